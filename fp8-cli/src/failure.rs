//! The failures that end the program, each with one sentence and an exit code.

use crate::interrupt;
use crate::table::is_harmful;
use fp8_nn::fp8_kernels;
use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

/// Why the program stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// An option, file or folder cannot be used. Exit code 2.
    Input(String),
    /// A file cannot be read or written on the way. Exit code 1.
    Work(String),
    /// A signal such as Ctrl-C, before anything was written. Exit code 130.
    Interrupted,
    /// A signal that ended a generation, whose text has been printed. Exit code 130.
    Ended,
    /// A signal that ended a training, with what was saved of it. Exit code 130.
    Stopped(String),
    /// Another process's failure, with its exit code; without a sentence if that process has told it.
    Process { sentence: String, code: u8 },
}

impl Failure {
    pub(crate) fn input(sentence: impl Into<String>) -> Self {
        Self::Input(sentence.into())
    }

    pub(crate) fn work(sentence: impl Into<String>) -> Self {
        Self::Work(sentence.into())
    }

    /// Adds a second clause to the sentence.
    pub(crate) fn with(self, clause: &str) -> Self {
        let add = |sentence: String| format!("{sentence}; {clause}");
        match self {
            Self::Input(sentence) => Self::Input(add(sentence)),
            Self::Work(sentence) => Self::Work(add(sentence)),
            Self::Stopped(sentence) => Self::Stopped(add(sentence)),
            Self::Interrupted | Self::Ended | Self::Process { .. } => self,
        }
    }

    /// Puts the option before the sentence whose file it names, and what was expected behind a file that is not there.
    pub(crate) fn of_file(option: &str, expected: &str, error: fp8_hf::Error) -> Self {
        if let fp8_hf::Error::NotFound { .. } = error {
            return Self::Input(format!("{option} {error}: {expected}"));
        }
        match Self::from(error) {
            Self::Input(sentence) => Self::Input(format!("{option} {sentence}")),
            Self::Work(sentence) => Self::Work(format!("{option} {sentence}")),
            ended => ended,
        }
    }

    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Input(_) => 2,
            Self::Work(_) => 1,
            Self::Interrupted | Self::Ended | Self::Stopped(_) => interrupt::CODE,
            Self::Process { code, .. } => *code,
        }
    }
}

/// The options of the library that an option of the program sets, and whether it has a value.
const OPTIONS: [(&str, &str, bool); 35] = [
    ("ignore", "--ignore", true),
    ("scheme", "--scheme", true),
    ("dtype", "--dtype", true),
    ("input_scales", "--calibrate", false),
    ("static_inputs", "--static-inputs", false),
    ("max_new_tokens", "--max-new-tokens", true),
    ("temperature", "--temperature", true),
    ("top_k", "--top-k", true),
    ("top_p", "--top-p", true),
    ("max_seq_length", "--seq-length", true),
    ("prompt token", "--prompt: token", true),
    ("seq", "--seq", true),
    ("micro_batch", "--accumulate: micro-batches of", true),
    ("max_grad_norm", "--clip", true),
    ("frozen", "--freeze", true),
    ("groups", "--group", true),
    ("graph", "--graph", false),
    ("warmup", "--warmup", true),
    ("rank", "--lora", true),
    ("alpha", "--lora-alpha", true),
    ("targets", "--lora-targets", true),
    ("target_modules", "--lora-targets", true),
    ("exclude_modules", "--lora-exclude", true),
    ("layers_to_transform", "--lora-layers", true),
    ("rank_pattern", "--rank-pattern", true),
    ("alpha_pattern", "--alpha-pattern", true),
    ("batch", "--batch", true),
    ("epochs", "--epochs", true),
    ("steps", "--steps", true),
    ("data", "--data:", true),
    ("loss", "--loss", false),
    ("pack", "--pack", false),
    ("cross_documents", "--cross-documents", false),
    ("validation", "--validation", true),
    ("too_long", "--too-long", false),
];

/// Returns the sentence of an error about kernels and devices in words of the program.
pub(crate) fn about_device(error: &fp8_kernels::Error) -> String {
    use fp8_kernels::Error;
    match error {
        Error::DriverMissing { library, searched } => {
            let searched: Vec<_> = searched.iter().map(|path| path.display().to_string()).collect();
            format!(
                "{library} not found (looked in {}): install NVIDIA's driver, version 570 or newer (580 without NVRTC), or \
                 use --device cpu",
                searched.join(", ")
            )
        }
        Error::NoCudaFeature { device } => {
            format!(
                "{device}: this program was built without the feature `cuda`: build it with it, or use --device cpu"
            )
        }
        Error::Capability { device, name, found: (major, minor), needed } => format!(
            "{device}: {name} has compute capability {major}.{minor}: expected {}.{} or newer; use another GPU, or --device cpu",
            needed.0, needed.1
        ),
        other => other.to_string(),
    }
}

/// Words of the library's, and those that name an option.
const WORDS: [(&str, &str); 8] = [
    ("use a loss on all tokens", "use --loss all"),
    ("split samples that are too long, which makes", "use --too-long split, which makes"),
    ("only the packing Stream lets", "only --pack stream lets"),
    ("use the packing Stream", "use --pack stream"),
    ("expected Stream", "expected --pack stream"),
    ("or choose another packing", "or add --pack whole"),
    (" (Validation::None)", ""),
    ("go on from an earlier checkpoint", "go on from an earlier checkpoint, if there is one"),
];

/// Writes options as the command line has them.
fn in_words(text: &str) -> String {
    WORDS.iter().fold(text.to_owned(), |text, (library, option)| text.replace(library, option))
}

fn about_option(option: &str, value: &str, remedy: &str) -> Option<String> {
    let (_, name, has_value) = OPTIONS.into_iter().find(|(known, ..)| *known == option)?;
    Some(if has_value { format!("{name} {value}: {remedy}") } else { format!("{name}: {remedy}") })
}

impl From<fp8_hf::Error> for Failure {
    fn from(error: fp8_hf::Error) -> Self {
        use fp8_hf::Error;
        let text = match &error {
            // Something was created at the output's path meanwhile.
            Error::Io { source, .. } if source.kind() == ErrorKind::AlreadyExists => error.to_string(),
            Error::Io { .. } | Error::Model(fp8_nn::Error::Io { .. }) => {
                return Self::Work(error.to_string());
            }
            Error::Option { option, value, remedy, .. }
            | Error::Model(
                fp8_nn::Error::Option { option, value, remedy, .. }
                | fp8_nn::Error::Kernels(fp8_nn::fp8_kernels::Error::Option { option, value, remedy, .. }),
            ) => about_option(option, value, remedy).unwrap_or_else(|| error.to_string()),
            Error::Model(fp8_nn::Error::Kernels(error)) => about_device(error),
            Error::NoGemm { path, problem } => {
                format!("{}: {problem}; use --recipe off, which quantizes no inputs", path.display())
            }
            Error::Ragged { scheme, multiple, layer, rows, cols, matrices } => format!(
                "--scheme {scheme}: `{layer}` is {rows} × {cols}, no multiple of {multiple} ({matrices} such matrices), which \
                 transformers refuses or misreads: use another scheme, ignore these layers (--ignore), or allow ragged blocks \
                 (--allow-ragged)"
            ),
            Error::NotFound { path } if path.file_name().is_some_and(|name| name == "config.json") => {
                let folder = path.parent().unwrap_or(Path::new("."));
                format!(
                    "{error}: {} is not a Hugging Face folder, which has config.json and safetensors files",
                    folder.display()
                )
            }
            _ => error.to_string(),
        };
        Self::Input(in_words(&text))
    }
}

impl From<fp8_nn::Error> for Failure {
    fn from(error: fp8_nn::Error) -> Self {
        fp8_hf::Error::from(error).into()
    }
}

/// One line, even if the cause has several.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (prefix, sentence) = match self {
            Self::Input(sentence) | Self::Work(sentence) => ("error: ", sentence.trim()),
            Self::Process { sentence, .. } => ("error: ", sentence.trim()),
            Self::Interrupted | Self::Ended => ("error: ", interrupt::SENTENCE),
            Self::Stopped(sentence) => ("", sentence.trim()),
        };
        // What is in a file, names of tensors included, must not control the terminal. Spaces stay: they may be those of a path.
        let lines: Vec<&str> = sentence.lines().map(str::trim).collect();
        let sentence = lines.join(" ").replace(['\r', '\t'], " ");
        let text = sentence.chars().map(|c| if is_harmful(c) { '\u{FFFD}' } else { c });
        write!(f, "{prefix}{}", text.collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_options_and_keep_spaces() {
        let error = fp8_hf::Error::Option {
            part: "quantize".into(),
            option: "ignore",
            value: "\"x\"".into(),
            remedy: "it matches no layer".into(),
        };
        assert_eq!(Failure::from(error), Failure::input("--ignore \"x\": it matches no layer"));
        let shown = |text: &str| Failure::input(text).to_string();
        assert_eq!(shown("a  b/c: not\nfound\u{202e}"), "error: a  b/c: not found\u{FFFD}");
        assert_eq!(shown("first\n  second\tthird"), "error: first second third");
        assert_eq!((Failure::input("x").code(), Failure::work("x").code()), (2, 1));
        let stopped = Failure::Stopped("at step 3".into()).with("saved");
        assert_eq!((stopped.to_string(), stopped.code()), ("at step 3; saved".to_owned(), 130));
        let error = fp8_kernels::Error::NoCudaFeature { device: "cuda:1".into() };
        assert!(Failure::from(fp8_nn::Error::from(error)).to_string().ends_with("or use --device cpu"));
        let error = fp8_kernels::Error::DriverMissing {
            library: "libcuda.so.1",
            searched: vec!["/a".into(), "/b".into()],
        };
        let told = about_device(&error);
        assert!(told.starts_with("libcuda.so.1 not found (looked in /a, /b): "), "{told}");
        assert!(told.ends_with("or use --device cpu"), "{told}");
        let error = fp8_hf::Error::NoGemm { path: "m".into(), problem: "no".into() };
        assert_eq!(
            Failure::from(error),
            Failure::input("m: no; use --recipe off, which quantizes no inputs")
        );
    }
}
