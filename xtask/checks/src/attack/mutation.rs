//! Changes of a safetensors file: bits, lengths, header, metadata, values.

use serde_json::{Map, Value, json};

use super::draw::Draw;

/// A changed file, and what was changed. The file is as large as the original, or a little larger.
pub(super) fn mutate(draw: &mut Draw, file: &[u8]) -> (&'static str, Vec<u8>) {
    let mut bytes = file.to_vec();
    let at = |draw: &mut Draw, bytes: &[u8]| draw.below(bytes.len());
    match draw.below(16) {
        0 => {
            for _ in 0..1 + draw.below(8) {
                let at = at(draw, &bytes);
                bytes[at] ^= 1 << draw.below(8);
            }
            ("flipped bits", bytes)
        }
        1 => {
            let header = bytes.len().min(8 + header_len(file));
            for _ in 0..1 + draw.below(3) {
                bytes[draw.below(header)] = draw.bits() as u8;
            }
            ("header bytes", bytes)
        }
        2 => {
            let len = if draw.flip() { draw.below(bytes.len()) } else { bytes.len() - 1 - draw.below(9) };
            bytes.truncate(len);
            ("truncated", bytes)
        }
        3 => {
            let more = 1 + draw.below(64);
            let byte = draw.pick(&[0, b' ', 0xFF]);
            bytes.resize(bytes.len() + more, byte);
            ("extended", bytes)
        }
        4 => {
            let len = header_len(file) as u64;
            let changed = draw.pick(&[0, 1, 2, 100_000_001, 1 << 32, 1 << 63, u64::MAX, u64::MAX - 7]);
            let near = draw.pick(&[len + 1, len - 1, len + 8, len - 8, len / 2]);
            let len = if draw.flip() { changed } else { near };
            bytes[..8].copy_from_slice(&len.to_le_bytes());
            ("header length", bytes)
        }
        5 => {
            let (from, to) = (at(draw, &bytes), at(draw, &bytes));
            let (from, to) = (from.min(to), from.max(to));
            let cut = bytes.splice(from..to, []).count();
            if draw.flip() {
                let noise: Vec<u8> = (0..cut).map(|_| draw.bits() as u8).collect();
                bytes.splice(from..from, noise);
            }
            ("piece cut out", bytes)
        }
        6 => {
            let len = draw.below(200);
            let mut noise: Vec<u8> = (0..len).map(|_| draw.bits() as u8).collect();
            if draw.flip() && len >= 8 {
                noise[..8].copy_from_slice(&((len - 8) as u64).to_le_bytes());
            }
            ("noise", noise)
        }
        7 => ("nested json", nested(draw)),
        8 => ("values", values(draw, bytes)),
        9 => ("a name twice", twice(draw, file)),
        10 | 11 => ("metadata", header(draw, file, metadata)),
        12 => ("tensors swapped", header(draw, file, swap)),
        _ => ("header", header(draw, file, entry)),
    }
}

fn header_len(file: &[u8]) -> usize {
    file.first_chunk::<8>().map_or(0, |len| u64::from_le_bytes(*len) as usize)
}

/// The file with another header.
fn with_header(file: &[u8], mut header: Vec<u8>) -> Vec<u8> {
    let data = file.get(8 + header_len(file)..).unwrap_or_default();
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header, data].concat()
}

fn header(draw: &mut Draw, file: &[u8], change: fn(&mut Draw, &mut Map<String, Value>)) -> Vec<u8> {
    let text = file.get(8..8 + header_len(file)).unwrap_or_default();
    let Ok(mut header) = serde_json::from_slice::<Map<String, Value>>(text) else { return file.to_vec() };
    for _ in 0..1 + draw.below(2) {
        change(draw, &mut header);
    }
    with_header(file, serde_json::to_vec(&header).unwrap_or_default())
}

/// A number that is hard to count with.
fn number(draw: &mut Draw) -> Value {
    match draw.below(8) {
        0 => json!(u64::MAX),
        1 => json!(1u64 << 63),
        2 => json!(1u64 << 53),
        3 => json!(-1),
        4 => json!(1.5),
        5 => json!(1e308),
        6 => json!(1u64 << 32),
        _ => json!(draw.below(20)),
    }
}

fn anything(draw: &mut Draw) -> Value {
    match draw.below(6) {
        0 => Value::Null,
        1 => json!([]),
        2 => json!({}),
        3 => json!("F32"),
        4 => json!([[0, 1], "x"]),
        _ => number(draw),
    }
}

fn name(draw: &mut Draw, header: &Map<String, Value>) -> Option<String> {
    let names: Vec<&String> = header.keys().filter(|name| *name != "__metadata__").collect();
    names.get(draw.below(names.len())).map(|name| (*name).clone())
}

/// An entry of a tensor that may be none any more.
fn set(tensor: &mut Value, key: &str, value: Value) {
    if let Some(tensor) = tensor.as_object_mut() {
        tensor.insert(key.to_owned(), value);
    }
}

/// One entry of one tensor changed, or the tensor renamed, removed, or invented.
fn entry(draw: &mut Draw, header: &mut Map<String, Value>) {
    let Some(name) = name(draw, header) else { return };
    let Some(tensor) = header.get_mut(&name) else { return };
    match draw.below(9) {
        0 => {
            let dtype =
                draw.pick(&["F32", "BF16", "F16", "I32", "U8", "F64", "F8_E4M3", "BOOL", "f32", "", "F4"]);
            set(tensor, "dtype", json!(dtype));
        }
        1 => set(tensor, "shape", json!([1u64 << 32, 1u64 << 32, 0])),
        2 => {
            if let Some(shape) = tensor.get_mut("shape").and_then(Value::as_array_mut) {
                match draw.below(3) {
                    0 => shape.reverse(),
                    1 => shape.push(json!(1)),
                    _ => {
                        let (at, number) = (draw.below(shape.len()), number(draw));
                        if let Some(extent) = shape.get_mut(at) {
                            *extent = number;
                        }
                    }
                }
            }
        }
        3 => {
            let at = draw.below(2);
            let number = number(draw);
            if let Some(offset) = tensor.get_mut("data_offsets").and_then(|both| both.get_mut(at)) {
                *offset = number;
            }
        }
        4 => set(tensor, "data_offsets", json!([0, 4])),
        5 => {
            let key = draw.pick(&["dtype", "shape", "data_offsets"]);
            set(tensor, key, anything(draw));
        }
        6 => drop(header.remove(&name)),
        7 => {
            if let Some(tensor) = header.remove(&name) {
                let renamed = draw.pick(&[
                    "",
                    "model.x",
                    "__metadata__",
                    "scaling.0.scale",
                    "optimizer.fc.weight.exp_avg",
                ]);
                header.insert(renamed.to_owned(), tensor);
            }
        }
        _ => {
            let tensor = json!({ "dtype": "U8", "shape": [0], "data_offsets": [0, 0] });
            let name = draw.pick(&["extra", "scaling.7.scale", "model."]);
            header.insert(name.to_owned(), tensor);
        }
    }
}

/// Two tensors change places.
fn swap(draw: &mut Draw, header: &mut Map<String, Value>) {
    let (Some(one), Some(other)) = (name(draw, header), name(draw, header)) else { return };
    let key = draw.pick(&["data_offsets", "data_offsets", "shape", "dtype"]);
    let (a, b) = (header[&one].get(key).cloned(), header[&other].get(key).cloned());
    for (name, value) in [(one, b), (other, a)] {
        if let (Some(place), Some(value)) = (header[&name].get_mut(key), value) {
            *place = value;
        }
    }
}

/// An entry of the metadata, or something inside the scaling state that is kept there.
fn metadata(draw: &mut Draw, header: &mut Map<String, Value>) {
    let Some(metadata) = header.get_mut("__metadata__").and_then(Value::as_object_mut) else { return };
    let keys: Vec<String> = metadata.keys().cloned().collect();
    let Some(key) = keys.get(draw.below(keys.len())).cloned() else { return };
    let text = metadata[&key].as_str().unwrap_or_default().to_owned();
    if let (Ok(mut inner), false) = (serde_json::from_str::<Value>(&text), draw.once_in(4)) {
        bend(draw, &mut inner);
        metadata[&key] = Value::String(inner.to_string());
        return;
    }
    match draw.below(5) {
        0 => drop(metadata.remove(&key)),
        1 => metadata[&key] = anything(draw),
        2 => {
            let text = draw.pick(&[
                "",
                "-1",
                "18446744073709551615",
                "18446744073709551616",
                "1e3",
                "0x1",
                " 1",
                "nan",
            ]);
            metadata[&key] = json!(text);
        }
        3 => {
            let cut: String = text.chars().take(draw.below(text.len() + 1)).collect();
            metadata[&key] = json!(cut);
        }
        _ => drop(metadata.insert(format!("{key}x"), json!("1"))),
    }
}

/// Something inside a value, however deep.
fn bend(draw: &mut Draw, value: &mut Value) {
    let is_here = draw.once_in(6);
    match value {
        Value::Array(items) if !items.is_empty() && !is_here => {
            let at = draw.below(items.len());
            match draw.below(8) {
                0 => drop(items.remove(at)),
                1 => items.push(items[at].clone()),
                2 => items.reverse(),
                _ => bend(draw, &mut items[at]),
            }
        }
        Value::Object(entries) if !entries.is_empty() && !is_here => {
            let keys: Vec<String> = entries.keys().cloned().collect();
            let key = &keys[draw.below(keys.len())];
            if draw.once_in(8) {
                entries.remove(key);
            } else if let Some(inner) = entries.get_mut(key) {
                bend(draw, inner);
            }
        }
        Value::Number(_) => *value = number(draw),
        Value::String(text) => {
            let at = draw.below(text.len() + 1);
            let other =
                draw.pick(&["0", "9", "len=", "backward", "forward", "E4M3", "NaN", "custom(\"x\")", "é"]);
            if text.is_char_boundary(at) {
                text.insert_str(at, other);
            }
        }
        _ => *value = anything(draw),
    }
}

/// Numbers that no training leaves, where they are read as f32.
fn values(draw: &mut Draw, mut bytes: Vec<u8>) -> Vec<u8> {
    let start = 8 + header_len(&bytes);
    let words = bytes.len().saturating_sub(start) / 4;
    for _ in 0..1 + draw.below(6) {
        let value =
            draw.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-45, -1.0, f32::MAX, 0.0, -2.0]);
        let at = start + 4 * draw.below(words);
        if let Some(word) = bytes.get_mut(at..at + 4) {
            word.copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}

/// A header in which one key occurs twice, which no map can hold.
fn twice(draw: &mut Draw, file: &[u8]) -> Vec<u8> {
    let text = file.get(8..8 + header_len(file)).unwrap_or_default();
    let Ok(header) = serde_json::from_slice::<Map<String, Value>>(text) else { return file.to_vec() };
    let name = if draw.once_in(4) { Some("__metadata__".to_owned()) } else { name(draw, &header) };
    let Some(name) = name else { return file.to_vec() };
    let entry = json!({ name.clone(): header[&name] }).to_string();
    let text = String::from_utf8_lossy(text);
    let rest = text.trim_end().strip_prefix('{').unwrap_or_default();
    let doubled = format!("{},{rest}", entry.strip_suffix('}').unwrap_or_default());
    with_header(file, doubled.into_bytes())
}

/// JSON that is deeper, or longer, than it has to be.
fn nested(draw: &mut Draw) -> Vec<u8> {
    let depth = draw.pick(&[100, 130, 5000, 200_000]);
    let open = draw.pick(&["[", "{\"a\":", "{\"__metadata__\":"]);
    let text = match draw.below(3) {
        0 => " ".repeat(depth),
        _ => open.repeat(depth),
    };
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutation_occurs_and_most_change_the_file() {
        let header = json!({
            "__metadata__": { "fp8.optimizer.step": "3", "fp8.scaling": "[{\"updates\":3,\"slots\":[\"a\"]}]" },
            "model.a": { "dtype": "F32", "shape": [2], "data_offsets": [0, 8] },
            "model.b": { "dtype": "U8", "shape": [1, 8], "data_offsets": [8, 16] },
        });
        let file = with_header(&[], serde_json::to_vec(&header).unwrap());
        let file = [file, vec![7; 16]].concat();
        let mut draw = Draw::new(1, 1, 1);
        let mut kinds = std::collections::BTreeSet::new();
        let mut unchanged = 0;
        for _ in 0..3000 {
            let (kind, bytes) = mutate(&mut draw, &file);
            unchanged += usize::from(bytes == file);
            kinds.insert(kind);
        }
        assert_eq!(kinds.len(), 13, "{kinds:?}");
        assert!(unchanged < 300, "{unchanged}");
    }
}
