//! The files of a folder: indexes of several, links, pipes, and tensors that no model needs.

use crate::folders::shard;
use crate::folders::{copy, golden, read, write};
use crate::hostile::damaged;
use fp8_hf::{Folder, Tokenizer};
use std::collections::BTreeMap;
use std::fs;

#[test]
fn an_index_that_does_not_fit_the_files_is_refused() {
    let index = |change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>)| {
        damaged(|folder| {
            shard(folder, 3);
            let path = folder.join("model.safetensors.index.json");
            let mut value: serde_json::Value =
                serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
            change(value["weight_map"].as_object_mut().unwrap());
            fs::write(&path, value.to_string()).unwrap();
        })
    };
    let name = "model.norm.weight";
    let path = "DIR/model.safetensors.index.json: ";
    for file in [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        ".",
        "",
        "./model-00001-of-00003.safetensors",
    ] {
        let error = index(&|map| drop(map.insert(name.into(), file.into())));
        let text = format!("{path}`{name}` is in \"{file}\": expected the name of a file in this folder");
        assert_eq!(error, text);
    }
    let error = index(&|map| drop(map.insert("extra".into(), "model-00001-of-00003.safetensors".into())));
    assert_eq!(
        error,
        format!("{path}it has `extra` in model-00001-of-00003.safetensors, but no file has this tensor")
    );
    let error = index(&|map| drop(map.insert(name.into(), "model-00001-of-00003.safetensors".into())));
    assert!(
        error.starts_with(&format!(
            "{path}it has `{name}` in model-00001-of-00003.safetensors, but the tensor is in"
        )),
        "{error}"
    );
    let error = index(&|map| drop(map.remove(name)));
    assert!(error.contains(&format!("has a tensor `{name}` that the index does not have")), "{error}");
    let twice = damaged(|folder| {
        shard(folder, 2);
        let path = folder.join("model.safetensors.index.json");
        let text = fs::read_to_string(&path).unwrap();
        let again = format!("\"weight_map\":{{\"{name}\":\"model-00002-of-00002.safetensors\",");
        fs::write(&path, text.replace("\"weight_map\":{", &again)).unwrap();
    });
    assert!(
        twice.starts_with(&format!("{path}not an index: `{name}` occurs twice, as \"model-00002-of-")),
        "{twice}"
    );
    let error = index(&|map| map.clear());
    assert_eq!(error, format!("{path}`weight_map` is empty: expected the file of each tensor"));
    let error = index(&|map| drop(map.insert(name.into(), 3.into())));
    assert!(error.contains("not an index: invalid type: integer `3`, expected a string"), "{error}");
    let missing = damaged(|folder| {
        shard(folder, 3);
        fs::remove_file(folder.join("model-00002-of-00003.safetensors")).unwrap();
    });
    assert_eq!(missing, "DIR/model-00002-of-00003.safetensors: not found: expected safetensors");
    let twice = damaged(|folder| {
        shard(folder, 3);
        let [a, b] = [1, 2].map(|file| folder.join(format!("model-0000{file}-of-00003.safetensors")));
        let (first, mut second) = (read(&a), read(&b));
        let (name, tensor) = first.into_iter().next().unwrap();
        second.insert(name, tensor);
        write(&b, &second);
    });
    assert!(twice.contains("is in model-00001-of-00003.safetensors, too: a tensor has one place"), "{twice}");
    let not_json = damaged(|folder| {
        shard(folder, 2);
        fs::write(folder.join("model.safetensors.index.json"), "{").unwrap();
    });
    assert!(not_json.starts_with(&format!("{path}not an index: ")), "{not_json}");
    let no_map = damaged(|folder| {
        shard(folder, 2);
        fs::write(folder.join("model.safetensors.index.json"), "{}").unwrap();
    });
    assert!(no_map.starts_with(&format!("{path}not an index: missing field `weight_map`")), "{no_map}");
}

#[test]
fn spare_tensors_of_old_files_are_kept_and_not_needed() {
    let place = tempfile::tempdir().unwrap();
    copy(&golden().join("llama_gqa_tied"), place.path());
    let file = place.path().join("model.safetensors");
    let mut tensors = read(&file);
    let embedding = tensors["model.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".into(), embedding);
    tensors
        .insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), ("F32".into(), vec![4], vec![0; 16]));
    write(&file, &tensors);
    Folder::open(place.path()).unwrap();

    // Indexes may lack them.
    shard(place.path(), 2);
    let index = place.path().join("model.safetensors.index.json");
    let mut value: serde_json::Value = serde_json::from_str(&fs::read_to_string(&index).unwrap()).unwrap();
    let map = value["weight_map"].as_object_mut().unwrap();
    map.retain(|name, _| name != "lm_head.weight" && !name.ends_with("inv_freq"));
    fs::write(&index, value.to_string()).unwrap();
    let out = place.path().join("out");
    Folder::open(place.path()).unwrap().save(&out, &BTreeMap::new()).unwrap();
    assert_eq!(crate::folders::tensors(&out), tensors);
}

#[cfg(unix)]
#[test]
fn links_to_nothing_are_named_before_the_work() {
    use std::os::unix::fs::symlink;
    for (name, at_open) in [
        ("config.json", true),
        ("generation_config.json", true),
        ("model.safetensors", true),
        ("tokenizer_config.json", false),
        ("additional_chat_templates", false),
    ] {
        let place = tempfile::tempdir().unwrap();
        let [folder, out] = ["model", "out"].map(|name| place.path().join(name));
        copy(&golden().join("llama_gqa_tied"), &folder);
        let _ = fs::remove_file(folder.join(name));
        symlink("../blobs/0123", folder.join(name)).unwrap();
        // What is not copied may be a link to nothing.
        symlink("nothing", folder.join("pytorch_model.bin")).unwrap();
        let error = match Folder::open(&folder) {
            Err(error) => error,
            Ok(folder) => {
                assert!(!at_open, "{name}");
                folder.save(&out, &BTreeMap::new()).unwrap_err()
            }
        };
        let text =
            "it is a link to ../blobs/0123, which does not exist: download it again, or remove the link";
        let file = folder.join(name);
        assert!(error.to_string().starts_with(&format!("{}: {text}", file.display())), "{error}");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1, "something was left");
    }
}

#[cfg(unix)]
#[test]
fn a_folder_of_templates_that_is_a_link_to_itself_is_copied_once() {
    use std::os::unix::fs::symlink;
    let place = tempfile::tempdir().unwrap();
    let [folder, out] = ["model", "out"].map(|name| place.path().join(name));
    copy(&golden().join("llama_gqa_tied"), &folder);
    fs::write(folder.join("chat_template.jinja"), "{{ messages }}").unwrap();
    symlink(".", folder.join("additional_chat_templates")).unwrap();
    Folder::open(&folder).unwrap().save(&out, &BTreeMap::new()).unwrap();
    let templates = out.join("additional_chat_templates");
    assert!(templates.join("chat_template.jinja").is_file());
    assert!(!templates.join("additional_chat_templates").exists() && !templates.join("config.json").exists());
    // A link that leads nowhere at all.
    symlink("loop", folder.join("loop")).unwrap();
    let error = Folder::open(&folder).unwrap().save(&place.path().join("other"), &BTreeMap::new());
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("loop: cannot be read: ") && error.ends_with("make it readable, or remove it"),
        "{error}"
    );
}

#[cfg(unix)]
#[test]
fn a_pipe_in_place_of_a_file_is_refused_and_not_waited_for() {
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        let place = tempfile::tempdir().unwrap();
        copy(&golden().join("llama_gqa_tied"), place.path());
        let path = place.path().join(name);
        let _ = fs::remove_file(&path);
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = match name {
            "tokenizer.json" => Tokenizer::open(place.path(), 96).unwrap_err().to_string(),
            _ => Folder::open(place.path()).unwrap_err().to_string(),
        };
        assert!(error.contains(&format!("{name}: not a file")), "{error}");
    }
}

/// The crate safetensors reads it as no metadata.
#[test]
fn metadata_that_is_null_is_none() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("a.safetensors");
    let tensor = r#""a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}"#;
    for header in
        [format!(r#"{{"__metadata__": null, {tensor}}}"#), format!(r#"{{{tensor}, "__metadata__":null}}"#)]
    {
        crate::folders::write_raw(&path, &header, &[1, 2]);
        assert!(safetensors::SafeTensors::deserialize(&fs::read(&path).unwrap()).is_ok());
        let weights = fp8_hf::Weights::open(&path).unwrap();
        assert_eq!(weights.names().collect::<Vec<_>>(), ["a"]);
    }
    let twice = format!(r#"{{"__metadata__": null, "__metadata__": {{}}, {tensor}}}"#);
    crate::folders::write_raw(&path, &twice, &[1, 2]);
    let error = fp8_hf::Weights::open(&path).unwrap_err().to_string();
    assert!(error.contains("`__metadata__` occurs twice"), "{error}");
}
