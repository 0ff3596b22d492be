//! The header of a safetensors file: its length in 8 bytes, JSON, spaces up to a multiple of 8. The data follows, and
//! offsets count from its start.

use super::strings::distinct_strings;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;

/// The number of bytes that store the length of the header.
const LENGTH: usize = 8;
/// The largest size of the JSON in bytes, which is the limit of the safetensors library.
const MAX_JSON: u64 = 100_000_000;

/// The contents of a safetensors file: its strings, and the place of each tensor.
///
/// ```
/// use fp8_nn::checkpoint::stream::Header;
/// use safetensors::tensor::{Dtype, TensorInfo};
///
/// let info = TensorInfo { dtype: Dtype::F32, shape: vec![2, 3], data_offsets: (0, 0) };
/// let mut header = Header { tensors: [("w".to_owned(), info)].into(), ..Default::default() };
/// assert_eq!(header.layout(), Some(vec!["w".to_owned()])); // its bytes are 0..24 of the data
/// let file = [header.to_bytes().unwrap(), vec![0; 24]].concat();
///
/// let (read, start) = Header::read(&mut file.as_slice(), file.len() as u64)?;
/// assert_eq!((read.tensors["w"].data_offsets, start), ((0, 24), file.len() as u64 - 24));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Header {
    /// The strings of `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// Each tensor's dtype, shape and place. Offsets count from the start of the data.
    pub tensors: BTreeMap<String, TensorInfo>,
}

impl Header {
    /// Assigns each tensor its place in the file: those with the largest elements first, so that all are aligned, then by
    /// name. Returns the names in this order, or `None` if a size overflows.
    pub fn layout(&mut self) -> Option<Vec<String>> {
        let mut order: Vec<(&String, &mut TensorInfo)> = self.tensors.iter_mut().collect();
        order.sort_by(|(a, left), (b, right)| right.dtype.cmp(&left.dtype).then(a.cmp(b)));
        let mut offset = 0usize;
        for (_, info) in &mut order {
            let begin = offset;
            offset = begin.checked_add(size(info)?)?;
            info.data_offsets = (begin, offset);
        }
        Some(order.into_iter().map(|(name, _)| name.clone()).collect())
    }

    /// Returns the bytes in front of the data. Keys are sorted, so that equal contents give equal bytes.
    ///
    /// # Errors
    /// A header of more than 100 MB, which no reader accepts.
    pub fn to_bytes(&self) -> Result<Vec<u8>, String> {
        let mut all = BTreeMap::new();
        for (name, info) in &self.tensors {
            all.insert(&**name, serde_json::to_value(info).map_err(|error| error.to_string())?);
        }
        let metadata = serde_json::to_value(&self.metadata).map_err(|error| error.to_string())?;
        all.insert(METADATA, metadata);
        let mut json = serde_json::to_vec(&all).map_err(|error| error.to_string())?;
        json.resize(json.len().next_multiple_of(LENGTH), b' ');
        let len = json.len() as u64;
        if len > MAX_JSON {
            return Err(format!("its header would have {len} bytes: at most {MAX_JSON} can be read"));
        }
        Ok([&len.to_le_bytes()[..], &json].concat())
    }

    /// Reads the header of a file of `file_len` bytes, and checks that its tensors fill the rest of it: no gap, no overlap,
    /// sizes that agree with shapes and dtypes. Returns it with the place where the data begins.
    ///
    /// # Errors
    /// [`HeaderError`].
    pub fn read(file: &mut impl Read, file_len: u64) -> Result<(Self, u64), HeaderError> {
        let mut len = [0; LENGTH];
        let rest = file_len.checked_sub(LENGTH as u64);
        let rest =
            rest.ok_or_else(|| malformed(format!("{file_len} bytes: a header has at least {LENGTH}")))?;
        file.read_exact(&mut len)?;
        let len = u64::from_le_bytes(len);
        if len > rest.min(MAX_JSON) {
            let text = format!("a header of {len} bytes: at most {} fit", rest.min(MAX_JSON));
            return Err(malformed(text));
        }
        // At most MAX_JSON, and at most the size of the file.
        let mut json = vec![0; usize::try_from(len).unwrap_or(0)];
        file.read_exact(&mut json)?;
        let header: Self = serde_json::from_slice(&json).map_err(|error| malformed(error.to_string()))?;
        let mut order: Vec<(String, TensorInfo)> =
            header.tensors.iter().map(|(name, info)| (name.clone(), info.clone())).collect();
        order.sort_by_key(|(_, info)| info.data_offsets);
        let checked = Metadata::new(None, order).map_err(|error| malformed(error.to_string()))?;
        let (data, left) = (checked.data_len() as u64, rest - len);
        if data != left {
            return Err(HeaderError::Length { tensors: data, file: left });
        }
        Ok((header, LENGTH as u64 + len))
    }
}

const METADATA: &str = "__metadata__";

/// Returns the size of a tensor in bytes, or `None` if it overflows.
fn size(info: &TensorInfo) -> Option<usize> {
    let elements = info.shape.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent))?;
    Some(elements.checked_mul(info.dtype.bitsize())? / 8)
}

/// The reason why a file has no valid header.
///
/// ```
/// use fp8_nn::checkpoint::stream::{Header, HeaderError};
/// let header = br#"{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}"#;
/// let file = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
/// let cut = Header::read(&mut &file[..], file.len() as u64);
/// assert!(matches!(cut, Err(HeaderError::Length { tensors: 8, file: 4 })));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file cannot be read.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The file is longer or shorter than its header says.
    #[error("its tensors have {tensors} bytes, but {file} follow the header")]
    Length {
        /// The bytes of all tensors.
        tensors: u64,
        /// The bytes behind the header.
        file: u64,
    },
    /// The header is none of safetensors.
    #[error("{0}")]
    Malformed(String),
}

fn malformed(text: String) -> HeaderError {
    HeaderError::Malformed(text)
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let (mut metadata, mut tensors) = (None, BTreeMap::new());
        while let Some(name) = map.next_key::<String>()? {
            let is_new = if name == METADATA {
                // `null` is the same as none, as in the crate safetensors.
                let strings = map.next_value::<Option<Strings>>()?.map(|strings| strings.0);
                metadata.replace(strings.unwrap_or_default()).is_none()
            } else {
                tensors.insert(name.clone(), map.next_value()?).is_none()
            };
            if !is_new {
                return Err(A::Error::custom(format!("`{name}` occurs twice")));
            }
        }
        Ok(Header { metadata: metadata.unwrap_or_default(), tensors })
    }
}

/// Strings by name. A name that occurs twice is an error.
#[derive(Deserialize)]
struct Strings(#[serde(deserialize_with = "distinct_strings")] BTreeMap<String, String>);
