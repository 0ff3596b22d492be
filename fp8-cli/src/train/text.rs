//! The text: bytes to train on, bytes held out, and the bigram model that a network has to beat.
//!
//! The last tenth of the bytes is held out: of `n` bytes the first `⌊9n / 10⌋` are trained on. [`fp8_hf::text::read`] says
//! which files of a folder are read.

use std::fs;
use std::path::Path;

use crate::failure::Failure;

/// Plays by Shakespeare, the same bytes in every version; `data/README.md` names their source.
const BUILT_IN_TEXT: &[u8] = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/data/shakespeare.txt"));

/// Name of the built-in text in checkpoints and reports.
const BUILT_IN: &str = "built-in";

/// A text that is long enough for sequences of a given length.
#[derive(Debug, Clone)]
pub(crate) struct Corpus {
    bytes: Vec<u8>,
    source: String,
}

impl Corpus {
    /// Reads `path`, or takes the built-in text, for sequences of `seq` bytes.
    pub(crate) fn load(path: Option<&Path>, seq: usize) -> Result<Self, Failure> {
        let (bytes, source) = match path {
            None => (BUILT_IN_TEXT.to_vec(), BUILT_IN.to_owned()),
            Some(path) => {
                let absolute = fs::canonicalize(path).map_err(|error| unreadable(path, &error))?;
                (read(path)?, absolute.to_string_lossy().into_owned())
            }
        };
        Self::new(bytes, source, seq)
    }

    /// Reads the text that [`Corpus::source`] named.
    pub(crate) fn reload(source: &str, seq: usize) -> Result<Self, Failure> {
        let path = (source != BUILT_IN).then(|| Path::new(source));
        Self::load(path, seq)
    }

    fn new(bytes: Vec<u8>, source: String, seq: usize) -> Result<Self, Failure> {
        if bytes.is_empty() {
            return Err(Failure::input(format!("--text {source}: empty; give a text to train on")));
        }
        let fits = |len: usize| split(len) > seq && len - split(len) >= 2;
        if !fits(bytes.len()) {
            let needed = (seq..).find(|&len| fits(len)).unwrap_or(usize::MAX);
            return Err(Failure::input(format!(
                "text {source}: {} bytes are too few: --seq {seq} needs at least {needed}, since a tenth is held out",
                bytes.len()
            )));
        }
        Ok(Self { bytes, source })
    }

    /// Returns the source of the text: an absolute path, or `built-in`.
    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The first nine tenths.
    pub(crate) fn train(&self) -> &[u8] {
        &self.bytes[..split(self.bytes.len())]
    }

    /// The last tenth.
    pub(crate) fn held_out(&self) -> &[u8] {
        &self.bytes[split(self.bytes.len())..]
    }

    /// Returns length and FNV-1a hash of the bytes, to compare the text of a checkpoint with.
    pub(crate) fn fingerprint(&self) -> String {
        let hash = self.bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        format!("{}-{hash:016x}", self.bytes.len())
    }

    /// Mean loss, in nats per byte over the pairs of the held-out text, of add-one bigrams counted on the rest:
    /// `−ln((count(a, b) + 1) / (count(a, ·) + 256))`.
    pub(crate) fn bigram_loss(&self) -> f64 {
        let mut pairs = vec![0_u64; 256 * 256];
        let mut firsts = vec![0_u64; 256];
        for pair in self.train().windows(2) {
            pairs[usize::from(pair[0]) * 256 + usize::from(pair[1])] += 1;
            firsts[usize::from(pair[0])] += 1;
        }
        let loss = |pair: &[u8]| {
            let count = pairs[usize::from(pair[0]) * 256 + usize::from(pair[1])];
            ((firsts[usize::from(pair[0])] + 256) as f64 / (count + 1) as f64).ln()
        };
        let held_out = self.held_out();
        held_out.windows(2).map(loss).sum::<f64>() / (held_out.len() - 1) as f64
    }
}

fn split(len: usize) -> usize {
    len / 10 * 9 + len % 10 * 9 / 10
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    fp8_hf::text::read(path).map_err(|error| match error {
        fp8_hf::Error::Io { path, source } => unreadable(&path, &source),
        other => Failure::input(other.to_string()),
    })
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::input(format!(
        "--text {}: {error}; give a text file that can be read, or a folder of them",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use sha2::{Digest as _, Sha256};

    use super::*;

    fn corpus(bytes: &[u8], seq: usize) -> Result<Corpus, Failure> {
        Corpus::new(bytes.to_vec(), "t".to_owned(), seq)
    }

    #[test]
    fn the_last_tenth_is_held_out() {
        let text: Vec<u8> = (0..=255).cycle().take(1005).collect();
        let corpus = corpus(&text, 8).unwrap();
        assert_eq!((corpus.train().len(), corpus.held_out().len()), (904, 101));
        assert_eq!([corpus.train(), corpus.held_out()].concat(), text);
    }

    #[test]
    fn a_folder_is_joined_in_path_order() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("b.txt", "3 three ");
        write("a/z.txt", "1 one ");
        write("a-b", "2 two ");
        write(".hidden", "0 zero ");
        let corpus = Corpus::load(Some(folder.path()), 4).unwrap();
        assert_eq!(corpus.bytes(), b"1 one 2 two 3 three ", "a hidden file is skipped");
        let again = Corpus::reload(corpus.source(), 4).unwrap();
        assert_eq!(again.fingerprint(), corpus.fingerprint());
    }

    #[test]
    fn missing_empty_and_short_texts_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let missing = Corpus::load(Some(&folder.path().join("none.txt")), 4).unwrap_err();
        assert!(missing.to_string().contains("none.txt"), "{missing}");
        let empty = Corpus::load(Some(folder.path()), 4).unwrap_err();
        assert!(empty.to_string().contains("empty"), "{empty}");
        let short = corpus(&[b'x'; 30], 64).unwrap_err();
        assert_eq!(
            short.to_string(),
            "error: text t: 30 bytes are too few: --seq 64 needs at least 73, since a tenth is held out"
        );
        assert!(corpus(&[b'x'; 72], 64).is_err());
        assert!(corpus(&[b'x'; 73], 64).is_ok());
    }

    /// On "abab…" with one "aa": counted by hand.
    #[test]
    fn bigram_loss_by_hand() {
        let corpus = corpus(&[b"abababababababababa".as_slice(), b"aab"].concat(), 4).unwrap();
        assert_eq!(corpus.held_out(), b"aab");
        // trained pairs: ab 9, ba 9; held-out pairs: aa (count 0), ab (count 9)
        let expected = -((1.0_f64 / 265.0).ln() + (10.0_f64 / 265.0).ln()) / 2.0;
        assert!((corpus.bigram_loss() - expected).abs() < 1e-12);
    }

    #[test]
    fn the_built_in_text_never_changes() {
        let corpus = Corpus::load(None, 64).unwrap();
        assert_eq!((corpus.bytes().len(), corpus.source()), (499_949, BUILT_IN));
        let hash: String = Sha256::digest(corpus.bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hash, "ec01df44e82107018c4403dac8155c9308b1789812529021ad7fe5788f9afaa1");
        let readme = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/data/README.md"));
        assert!(readme.contains(&hash) && readme.contains("| 499,949 |"));
    }
}
