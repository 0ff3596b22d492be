//! Chat templates: where they are found, and those that mean harm.

use super::training_data::{Reader, one_a_sequence};
use fp8_hf::data::ChatTemplate;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn opened(text: &str) -> fp8_hf::Result<ChatTemplate> {
    let place = tempfile::tempdir().unwrap();
    fs::write(place.path().join("chat_template.jinja"), text).unwrap();
    fs::write(place.path().join("tokenizer_config.json"), r#"{"eos_token": "</s>", "bos_token": "<s>"}"#)
        .unwrap();
    ChatTemplate::open(place.path()).map(Option::unwrap)
}

fn messages() -> Vec<Value> {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    vec![message("user", "a"), message("assistant", "b"), message("user", "c"), message("assistant", "d")]
}

fn rendered(text: &str) -> String {
    opened(text).unwrap().render(&messages(), true).unwrap()
}

fn refused(text: &str) -> String {
    let error = match opened(text) {
        Err(error) => error,
        Ok(template) => template.render(&messages(), false).unwrap_err(),
    };
    let error = error.to_string();
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

#[test]
fn templates_have_what_transformers_offers() {
    for (template, text) in [
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}{{ pad_token }}", "abcd</s>"),
        ("{{ messages[::-1][0].content }}{{ messages[1:-1] | length }}{{ 'abc'[::-1] }}", "d2cba"),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
            "b",
        ),
        (
            "{{ ' a '.strip() ~ 'x-y'.split('-')[1] ~ 'ab'.startswith('a') ~ 'aa'.replace('a', 'b') }}",
            "ayTruebb",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "2",
        ),
        (
            "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join) }}",
            "<ac>",
        ),
        ("{{ messages[0] | tojson }}", r#"{"content": "a", "role": "user"}"#),
        (
            "{{ tools is none }}{{ documents is none }}{{ enable_thinking is defined }}{{ add_generation_prompt }}",
            "TrueTrueFalseTrue",
        ),
        ("{% if true %}\n    {% if true %}\nx\n    {% endif %}\n{% endif %}\n", "x\n"),
        ("a{% generation %}b{% endgeneration %}", "ab"),
    ] {
        assert_eq!(rendered(template), text, "{template}");
    }
    let year = rendered("{{ strftime_now('%Y') }}");
    assert!(year.parse::<u32>().unwrap() > 2024);
}

#[test]
fn answers_are_found_by_blocks_and_by_prefixes() {
    let of = |text: &str| {
        let (text, answers) = opened(text).unwrap().conversation(&messages()).unwrap();
        answers.into_iter().map(|answer| text[answer].to_owned()).collect::<Vec<_>>()
    };
    let start = "{% for m in messages %}<{{ m.role }}>";
    let end = "\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    assert_eq!(of(&format!("{start}{{{{ m.content }}}}</s>{end}")), ["b</s>", "d</s>"]);
    // Without a special token at its end, an answer goes to the end of its text.
    assert_eq!(of(&format!("{start}{{{{ m.content }}}}.{end}")), ["b.\n", "d.\n"]);
    let blocks = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ m.content }}!\
                  {% endgeneration %}{% endif %}{% endfor %}";
    assert_eq!(of(blocks), ["b!", "d!"]);
    let none = opened("{% if false %}{% generation %}{% endgeneration %}{% endif %}").unwrap();
    let error = none.conversation(&messages()).unwrap_err().to_string();
    assert!(error.ends_with("the chat template marks no answer by `{% generation %}`"), "{error}");
    let nested = "{% generation %}{% generation %}{% endgeneration %}{% endgeneration %}";
    let error = opened(nested).unwrap().conversation(&messages()).unwrap_err().to_string();
    assert!(error.contains("is nested, or a message has characters that mark answers"), "{error}");
    let error = opened("{{ messages | length }}").unwrap().conversation(&messages()).unwrap_err().to_string();
    assert!(error.contains("renders earlier messages differently once later ones follow"), "{error}");
}

#[test]
fn templates_are_found_where_transformers_looks() {
    let place = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(place.path().join(name), text).unwrap();
    let text =
        || ChatTemplate::open(place.path()).map(|found| found.map(|found| found.render(&[], false).unwrap()));
    assert_eq!(text().unwrap(), None);
    write("chat_template.json", r#"{"chat_template": "older"}"#);
    assert_eq!(text().unwrap().unwrap(), "older");
    write("tokenizer_config.json", r#"{"chat_template": null}"#);
    assert_eq!(text().unwrap().unwrap(), "older");
    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": "list"}]}"#,
    );
    assert_eq!(text().unwrap().unwrap(), "list");
    for (wrong, problem) in [
        (
            r#"{"chat_template": [{"name": "rag", "template": "x"}]}"#,
            "has no template with the name `default`",
        ),
        (r#"{"chat_template": 5}"#, "is no template: expected a string, or a list of named ones"),
        (r#"{"chat_template": "#, "not a JSON object"),
    ] {
        write("tokenizer_config.json", wrong);
        let error = text().unwrap_err().to_string();
        assert!(error.contains(problem) && error.contains("tokenizer_config.json"), "{error}");
    }
    write("tokenizer_config.json", r#"{"chat_template": "string"}"#);
    assert_eq!(text().unwrap().unwrap(), "string");
    write("chat_template.jinja", "file");
    assert_eq!(text().unwrap().unwrap(), "file");
}

#[test]
fn templates_are_read_as_jinja_does() {
    let text = |template: &str| opened(template).unwrap().render(&messages(), false).unwrap();
    assert_eq!(text("a\r\nb\rc"), "a\nb\nc");
    assert_eq!(text("{{ 'abc'.count('') }} {{ 'abcabc'.count('bc') }}"), "4 2");
}

#[test]
fn hostile_templates_neither_hang_nor_stop_the_program() {
    let deep = "{% if true %}".repeat(5000);
    let brackets = "(".repeat(100_000);
    let nested =
        "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    for (template, problem) in [
        (
            "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
            "takes more than 1000000 steps",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion limit exceeded"),
        (nested, ""),
        (&format!("{nested}{{{{ ns.x }}}}"), ""),
        (&format!("{nested}{{{{ ns.x | tojson }}}}"), ""),
        (&deep, "not a template that can be read"),
        (&format!("{{{{ {brackets} }}}}"), "not a template that can be read"),
        ("{{ 'x' * 100000000000 }}", "repeated string is too large"),
        ("{{ [][::-2] }}{% for x in [][::-2] %}{% endfor %}", ""),
        ("{{ raise_exception('two\nlines') }}", "the chat template refuses it: two lines"),
        (
            "{{ messages | nonsense }}",
            "(chat_template.jinja line 1): unknown filter: filter nonsense is unknown",
        ),
        ("{{ messages[0].content.nonsense() }}", "unknown method"),
        ("{% include 'x' %}", "template not found"),
        ("{{ debug() }}", "debug"),
        (
            "{% for i in range(50000) %}{{ 'abcdefghij' * 1000 }}{% endfor %}",
            "the chat template makes a text of more than 64 MiB of it",
        ),
        ("{{ strftime_now('%Q') }}", "strftime_now: `%Q` is not supported"),
    ] {
        let start = std::time::Instant::now();
        if problem.is_empty() {
            let _ = opened(template).map(|template| template.render(&messages(), false).map(drop));
        } else {
            let error = refused(template);
            assert!(error.contains(problem), "{problem}: {error}");
            assert!(error.contains("chat_template.jinja"), "{error}");
        }
        assert!(start.elapsed().as_secs() < 20, "{template:.100}");
    }
}

#[test]
fn a_missing_start_token_is_said_once() {
    let reader = Reader::new("header_bos");
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(reader_place().join(name), folder.path().join(name)).unwrap();
    }
    let template = "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>{% endfor %}\
                    {% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}";
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let tokenizer = fp8_hf::Tokenizer::open(folder.path(), reader.folder.config.vocab_size).unwrap();
    let reader = Reader { tokenizer, ..reader };
    let data = folder.path().join("chat.jsonl");
    let line = json!({"messages": messages()}).to_string();
    fs::write(&data, format!("{line}\n{line}\n")).unwrap();
    let opened = reader.open(&data, &one_a_sequence(128)).unwrap();
    assert_eq!(
        opened.train.summary().warnings,
        [
            "2 conversations begin without the token that the tokenizer puts in front of a text: the chat template does not write it, \
          and it was not added"
        ]
    );
    assert!(opened.train.summary().to_string().contains(" Warning: 2 conversations begin without"));
    // Its own template writes the token.
    let opened = Reader::new("header_bos").open(&data, &one_a_sequence(128)).unwrap();
    assert!(opened.train.summary().warnings.is_empty());
}

#[test]
fn a_template_that_fails_names_the_line_of_the_data() {
    let reader = Reader::new("model");
    let folder = tempfile::tempdir().unwrap();
    fs::copy(super::training_data::data().join("model/tokenizer.json"), folder.path().join("tokenizer.json"))
        .unwrap();
    let data = folder.path().join("chat.jsonl");
    let line = json!({"messages": messages()}).to_string();
    fs::write(&data, format!("\n{line}\n")).unwrap();
    for (template, problem) in [
        ("{{ [][::-2] }}", "chat.jsonl: line 2: the chat template contradicts itself: it stopped"),
        (
            "{{ x.y }}",
            "chat.jsonl: line 2: the chat template fails (chat_template.jinja line 1): undefined value",
        ),
        (
            "{% for m in messages %}{{ loop.length }}{% endfor %}",
            "chat.jsonl: line 2: the chat template renders earlier messages differently once later ones follow, or cannot render the \
             prompt of an answer alone: split samples that are too long, which makes a sample for each answer here, or use another \
             template",
        ),
    ] {
        fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        let tokenizer = fp8_hf::Tokenizer::open(folder.path(), reader.folder.config.vocab_size).unwrap();
        let reader = Reader { tokenizer, folder: fp8_hf::Folder::open(reader.folder.path()).unwrap() };
        let error = reader.error(&data, &one_a_sequence(128));
        assert!(error.ends_with(problem), "{error}");
    }
}

fn reader_place() -> std::path::PathBuf {
    Path::new(&super::training_data::data()).join("templates/header_bos")
}
