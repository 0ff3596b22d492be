//! The tokens that stand outside `tokenizer.json`, read as transformers 5 does (`from_pretrained`).
//!
//! | where | what |
//! |---|---|
//! | `tokenizer_config.json`, `added_tokens_decoder` | tokens by id, which take precedence over those of `tokenizer.json` |
//! | `tokenizer_config.json`, `bos_token` and others that end in `_token` | special tokens by their use |
//! | `tokenizer_config.json`, `extra_special_tokens` or, without it, `additional_special_tokens` | more special tokens |
//! | `special_tokens_map.json` | the same two; read without `added_tokens_decoder`, and takes precedence then |
//! | `added_tokens.json` | ids by token; read without `added_tokens_decoder` |
//!
//! Tokens with an id are added in the order of their ids, then the special tokens by their use, then the others. A token that the
//! vocabulary of the model has keeps its id, and another one gets the next free id. transformers ignores the ids that files state.
//! Here an id that a file states and the token does not have is an error.

use super::caught::caught;
use crate::config::fields::Fields;
use crate::config::text::in_order;
use crate::files::{exists, read_text};
use crate::{Error, Result, json};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use tokenizers::AddedToken;

/// The file of the tokenizer itself.
pub(super) const FILE: &str = "tokenizer.json";

const CONFIG: &str = "tokenizer_config.json";
const SPECIAL: &str = "special_tokens_map.json";
const ADDED: &str = "added_tokens.json";
/// The field with tokens by id.
const DECODER: &str = "added_tokens_decoder";
/// The fields with a list of special tokens. The first one is the older name.
const LISTS: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];
/// The special tokens that every tokenizer may have, in the order in which they are added.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A token with the id that a file states.
struct Stated {
    file: &'static str,
    id: u32,
    content: String,
}

/// A token as a file describes it.
#[derive(Clone)]
struct Token {
    added: AddedToken,
    /// Whether the file has a string in place of a token with flags.
    is_string: bool,
    /// Whether the file says if it is matched in the normalized text. Otherwise it is, unless it is special.
    is_explicit: bool,
    /// Whether it is an object in `tokenizer_config.json`. transformers reads those last, so `added_tokens.json` does not know that
    /// they are special.
    is_late: bool,
}

/// A token with the name of its field.
type Named = (String, Token);

/// The special tokens, which have no ids.
#[derive(Default)]
struct Special {
    /// The fields of [`NAMED`].
    named: BTreeMap<&'static str, Token>,
    /// Other fields that end in `_token`: those of `special_tokens_map.json`, and objects.
    others: Vec<Named>,
    /// More of them: strings of `tokenizer_config.json`, and [`LISTS`] that are objects.
    own: Vec<Named>,
    /// `extra_special_tokens`, or `additional_special_tokens` of `tokenizer_config.json`.
    list: Option<Vec<Token>>,
    /// `additional_special_tokens` where `list` is present, too, or of `special_tokens_map.json`. Used if there is no `list`.
    older: Option<Vec<Token>>,
}

/// Adds the tokens in the files of `folder` to the tokenizer that was read from `bytes`, the contents of its `tokenizer.json`.
///
/// # Errors
/// A file that cannot be read; a token that is none; an id with two tokens, and a token with two ids.
pub(super) fn add(folder: &Path, bytes: &[u8], tokenizer: &mut tokenizers::Tokenizer) -> Result<()> {
    let problem = |file: &str, problem| Error::File { path: folder.join(file), problem };
    let of = |file: &'static str| move |text| problem(file, text);
    let mut stated = Vec::new();
    let config = read(folder, CONFIG)?;
    let mut special = Special::default();
    let mut by_id = BTreeMap::new();
    let decoder = match &config {
        Some((map, _)) => Fields::new(map, "").object(DECODER).map_err(of(CONFIG))?,
        None => None,
    };
    let is_legacy = decoder.is_none();
    if let Some(decoder) = decoder {
        by_id = decoded(decoder).map_err(of(CONFIG))?;
        stated.extend(by_id.iter().map(|(&id, token)| (CONFIG, id, token.clone())));
    }
    if let Some((map, text)) = &config {
        special.read_config(map, text).map_err(of(CONFIG))?;
    }
    let map = if is_legacy { read(folder, SPECIAL)? } else { None };
    if let Some((map, text)) = map {
        special.read_map(&map, &text).map_err(of(SPECIAL))?;
    }
    if let Some((map, _)) = read(folder, ADDED)? {
        let tokens = special.encoded(&map).map_err(of(ADDED))?;
        stated.extend(tokens.iter().map(|(id, token)| (ADDED, *id, token.clone())));
        by_id.extend(tokens.into_iter().filter(|_| is_legacy));
    }
    if is_legacy {
        by_id.extend(own_tokens(bytes).map_err(of(FILE))?);
    }
    let added = special.into_added(by_id, tokenizer);
    caught(|| tokenizer.add_tokens(added)).map_err(of(FILE))?;
    if let Some((map, _)) = &config {
        let splits = Fields::new(map, "").flag("split_special_tokens").map_err(of(CONFIG))?;
        tokenizer.set_encode_special_tokens(splits.unwrap_or(false));
    }
    let stated =
        stated.into_iter().map(|(file, id, token)| Stated { file, id, content: token.added.content });
    stated.into_iter().try_for_each(|stated| stated.check(tokenizer).map_err(of(stated.file)))
}

/// Reads a JSON object, if the file is there, with its text.
fn read(folder: &Path, file: &str) -> Result<Option<(Map<String, Value>, String)>> {
    let path = folder.join(file);
    if !exists(&path) {
        return Ok(None);
    }
    let text = json::standard(&read_text(&path)?).into_owned();
    match json::object(&text) {
        Ok(map) => Ok(Some((map, text))),
        Err(problem) => Err(Error::File { path, problem }),
    }
}

/// Returns the tokens that `tokenizer.json` adds to its vocabulary.
fn own_tokens(bytes: &[u8]) -> Result<Vec<(u32, Token)>, String> {
    #[derive(Deserialize)]
    struct File {
        #[serde(default)]
        added_tokens: Vec<WithId>,
    }
    #[derive(Deserialize)]
    struct WithId {
        id: u32,
        #[serde(flatten)]
        token: AddedToken,
    }
    let file: File = serde_json::from_slice(bytes).map_err(|error| format!("not a tokenizer: {error}"))?;
    let token = |added| Token { added, is_string: false, is_explicit: true, is_late: false };
    Ok(file.added_tokens.into_iter().map(|own| (own.id, token(own.token))).collect())
}

/// Returns the tokens of `added_tokens_decoder`.
fn decoded(decoder: &Map<String, Value>) -> Result<BTreeMap<u32, Token>, String> {
    let mut tokens = BTreeMap::new();
    for (name, value) in decoder {
        let path = format!("{DECODER}.{name}");
        let id = name.trim().parse::<u32>();
        let id = id.map_err(|_| format!("`{path}`: expected a token id, from 0 to {}", u32::MAX))?;
        let object = value.as_object().ok_or_else(|| wrong(&path, value, "a token as an object"))?;
        let token = Token::read(object, &path, false)?;
        if let Some(other) = tokens.insert(id, token) {
            return Err(format!(
                "`{path}` is the second token with this id: the first is {:?}",
                other.content()
            ));
        }
    }
    Ok(tokens)
}

impl Special {
    /// Reads the special tokens of `tokenizer_config.json`.
    fn read_config(&mut self, map: &Map<String, Value>, text: &str) -> Result<(), String> {
        for (key, value) in named(map, text) {
            let is_marked = value.get("__type").is_some_and(|kind| kind == "AddedToken");
            let known = NAMED.into_iter().find(|&name| name == key);
            let read = match value {
                Value::String(content) => Token::plain(content, true),
                Value::Object(object) if is_marked || known.is_some() => Token::read(object, &key, false)?,
                value if known.is_some() => return Err(wrong(&key, value, "a token")),
                _ => continue,
            };
            match known {
                Some(name) => drop(self.named.insert(name, read)),
                None if value.is_string() => put(&mut self.own, key, read),
                None => put(&mut self.others, key, read),
            }
        }
        let [older, newer] = LISTS;
        let mut list = tokens(map, newer, text, false)?;
        let mut key = newer;
        self.older = contents(tokens(map, older, text, false)?);
        if self.older.is_some() && list.as_ref().is_none_or(Vec::is_empty) {
            self.older = None;
            (list, key) = (tokens(map, older, text, false)?, older);
        }
        match map.get(key) {
            Some(Value::Object(_)) => {
                list.into_iter().flatten().for_each(|(key, token)| put(&mut self.own, key, token))
            }
            _ => self.list = contents(list),
        }
        for token in self.named.values_mut().chain(self.list.iter_mut().flatten()) {
            token.is_late = !token.is_string;
        }
        Ok(())
    }

    /// Reads `special_tokens_map.json`, which replaces what `tokenizer_config.json` says. All of its tokens are special.
    fn read_map(&mut self, map: &Map<String, Value>, text: &str) -> Result<(), String> {
        self.named.retain(|name, _| !map.contains_key(*name));
        self.others.retain(|(name, _)| map.get(name).is_none_or(|value| !value.is_null()));
        for (key, value) in named(map, text) {
            let known = NAMED.into_iter().find(|&name| name == key);
            let read = match value {
                Value::String(content) => Token::plain(content, true),
                Value::Object(object) => Token::read(object, &key, true)?,
                value if known.is_some() => return Err(wrong(&key, value, "a token")),
                _ => continue,
            };
            match known {
                Some(name) => drop(self.named.insert(name, read)),
                None => put(&mut self.others, key, read),
            }
        }
        let [older, newer] = LISTS;
        let more = tokens(map, newer, text, true)?.into_iter().flatten();
        match map.get(newer) {
            Some(Value::Object(_)) => {
                self.list = None;
                more.for_each(|(key, token)| put(&mut self.own, key, token));
            }
            Some(Value::Array(_)) => {
                self.list.get_or_insert_default().extend(more.map(|(_, token)| token));
            }
            Some(_) => self.list = Some(Vec::new()),
            None => {}
        }
        if map.contains_key(older) {
            self.older = contents(tokens(map, older, text, false)?);
        }
        Ok(())
    }

    /// Returns the tokens of `added_tokens.json`.
    fn encoded(&self, map: &Map<String, Value>) -> Result<Vec<(u32, Token)>, String> {
        let named = self.named.values().chain(self.list.iter().flatten());
        let special: BTreeSet<&str> = named.filter(|token| !token.is_late).map(Token::content).collect();
        let id = |(content, value): (&String, &Value)| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            let expected = format!("a token id, from 0 to {}", u32::MAX);
            let id = id.ok_or_else(|| wrong(content, value, &expected))?;
            let mut token = Token::plain(content, special.contains(content.as_str()));
            (token.is_string, token.is_explicit) = (false, true);
            Ok((id, token))
        };
        map.iter().map(id).collect()
    }

    /// Returns what is added to the tokenizer, in the order in which new ids are given.
    fn into_added(
        mut self,
        by_id: BTreeMap<u32, Token>,
        tokenizer: &tokenizers::Tokenizer,
    ) -> Vec<AddedToken> {
        // What has an id has its flags, too.
        let by_content: BTreeMap<&str, &Token> =
            by_id.values().map(|token| (token.content(), token)).collect();
        for token in self.named.values_mut() {
            if let Some(&known) = by_content.get(token.content()) {
                *token = known.clone();
            }
        }
        for (key, token) in self.own {
            put(&mut self.others, key, token);
        }
        let others = self.others.into_iter().map(|(_, token)| token);
        let in_order = NAMED.into_iter().filter_map(|name| self.named.remove(name));
        let named: Vec<Token> = in_order.chain(others).collect();
        // Tokens of tokenizer.json that have an id are added again: those that have a use become special.
        let mut added: Vec<Token> = by_id.into_values().collect();
        let present = tokenizer.get_added_tokens_decoder();
        let mut known: BTreeSet<String> = present.values().map(|token| token.content.clone()).collect();
        known.extend(added.iter().map(|token| token.content().to_owned()));
        for token in named.iter().chain(self.list.or(self.older).iter().flatten()) {
            if !known.contains(token.content()) && !added.iter().any(|other| other.is_same(token)) {
                added.push(token.clone());
            }
        }
        let is_named = |token: &&mut Token| named.iter().any(|named| named.content() == token.content());
        added.iter_mut().filter(is_named).for_each(Token::make_special);
        added.into_iter().map(|token| token.added).collect()
    }
}

impl Token {
    /// A token that is only a string.
    fn plain(content: &str, is_special: bool) -> Self {
        Self {
            added: AddedToken::from(content, is_special),
            is_string: true,
            is_explicit: false,
            is_late: false,
        }
    }

    /// Reads a token with its flags, as transformers writes it.
    fn read(object: &Map<String, Value>, path: &str, is_special: bool) -> Result<Self, String> {
        let path = format!("{path}.");
        let fields = Fields::new(object, &path);
        let content = fields.text("content")?.ok_or_else(|| format!("`{path}content` is missing"))?;
        let flag = |key| Ok::<_, String>(fields.flag(key)?.unwrap_or(false));
        let added = AddedToken::from(content, flag("special")? || is_special);
        let normalized = fields.flag("normalized")?;
        let added = added.single_word(flag("single_word")?).lstrip(flag("lstrip")?).rstrip(flag("rstrip")?);
        let added = match normalized {
            Some(normalized) => added.normalized(normalized),
            None => added,
        };
        Ok(Self { added, is_string: false, is_explicit: normalized.is_some(), is_late: false })
    }

    /// Whether transformers takes one for the other.
    fn is_same(&self, other: &Self) -> bool {
        self.added == other.added && self.is_string == other.is_string
    }

    fn make_special(&mut self) {
        self.added.special = true;
        self.added.normalized &= self.is_explicit;
    }

    fn content(&self) -> &str {
        &self.added.content
    }
}

impl Stated {
    /// Checks that the token has its id.
    fn check(&self, tokenizer: &tokenizers::Tokenizer) -> Result<(), String> {
        let Self { id, content, .. } = self;
        let holder = tokenizer.id_to_token(*id).filter(|holder| holder != content);
        match (tokenizer.token_to_id(content), holder) {
            // transformers skips it, wherever it is.
            _ if content.is_empty() => Ok(()),
            (Some(found), _) if found == *id => Ok(()),
            (None, None) => Ok(()),
            (Some(found), None) => Err(format!(
                "token {content:?} has id {id}, but it is {found} in the tokenizer: a token has one id, and new ones follow the \
                 vocabulary without a gap"
            )),
            (_, Some(holder)) => Err(format!(
                "token {content:?} has id {id}, which is that of {holder:?} in the tokenizer: an id has one token"
            )),
        }
    }
}

/// Returns the fields whose names end in `_token` and that have a value, in their order.
fn named<'a>(map: &'a Map<String, Value>, text: &'a str) -> impl Iterator<Item = (String, &'a Value)> {
    let fields = in_order(text).filter(|(key, _)| key.ends_with("_token"));
    fields.filter_map(|(key, _)| map.get(&key).filter(|value| !value.is_null()).map(|value| (key, value)))
}

/// Adds a token, or replaces that of the same name.
fn put(list: &mut Vec<Named>, key: String, token: Token) {
    match list.iter_mut().find(|(other, _)| *other == key) {
        Some((_, other)) => *other = token,
        None => list.push((key, token)),
    }
}

/// Returns the tokens in the field `key`: those of a list, or of an object with their names. `None` if there is no such field.
fn tokens(
    map: &Map<String, Value>,
    key: &str,
    text: &str,
    is_special: bool,
) -> Result<Option<Vec<Named>>, String> {
    let one = |name: &str, value: &Value| match value {
        Value::String(content) => Ok((name.to_owned(), Token::plain(content, true))),
        Value::Object(object) => {
            // Older versions wrote special tokens without this mark.
            let is_special = is_special || !object.contains_key("__type");
            Ok((name.to_owned(), Token::read(object, &format!("{key}.{name}"), is_special)?))
        }
        value => Err(wrong(&format!("{key}.{name}"), value, "a token")),
    };
    let list: Result<_, String> = match map.get(key) {
        None => return Ok(None),
        Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => {
            list.iter().enumerate().map(|(index, value)| one(&index.to_string(), value)).collect()
        }
        Some(Value::Object(object)) => {
            let text = in_order(text).find(|(name, _)| name == key).map_or("", |(_, value)| value);
            let value = |(name, _): (String, &str)| object.get(&name).map(|value| one(&name, value));
            in_order(text).filter_map(value).collect()
        }
        Some(value) => Err(wrong(key, value, "a list of tokens")),
    };
    list.map(Some)
}

/// Returns the tokens without their names.
fn contents(tokens: Option<Vec<Named>>) -> Option<Vec<Token>> {
    tokens.map(|tokens| tokens.into_iter().map(|(_, token)| token).collect())
}

fn wrong(path: &str, value: &Value, expected: &str) -> String {
    let map = Map::from_iter([(path.to_owned(), value.clone())]);
    Fields::new(&map, "").wrong(path, expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_special_by_its_own_flag_or_by_its_use() {
        let read = |json: &str, is_special| {
            let Value::Object(object) = serde_json::from_str(json).unwrap() else { panic!("no object") };
            Token::read(&object, "t", is_special).unwrap().added.special
        };
        let [with, without] = [r#"{"content": "<s>", "special": true}"#, r#"{"content": "<s>"}"#];
        assert_eq!([read(with, false), read(without, true)], [true, true]);
        assert_eq!([read(with, true), read(without, false)], [true, false]);
    }
}
