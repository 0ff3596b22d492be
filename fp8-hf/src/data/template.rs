//! The chat template of a model: Jinja, set up as transformers sets it up.
//!
//! A template comes with a model that someone else made, so it is not trusted: a render has a limit of steps, runs on a thread with
//! a large stack, and a panic in it becomes an error.

mod functions;

use super::special::{CONFIG, SpecialTokens, object};
use crate::files::{exists, read_text};
use crate::{Error, Result};
use functions::{REVERSED, Raised};
use minijinja::value::Kwargs;
use minijinja::{Environment, ErrorKind, State, Value};
use regex::Regex;
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

const FILE: &str = "chat_template.jinja";
/// The name of the field with a template, and of an older file with it.
const FIELD: &str = "chat_template";
const OLDER: &str = "chat_template.json";
/// The name of the function that replaces `{% generation %}`.
const GENERATION: &str = "_generation";
/// The name of the template in the environment, which errors state.
const NAME: &str = "template";
/// The steps of one render.
const FUEL: u64 = 1_000_000;
/// A template can nest values as deep as its steps allow, and a stack frame for each is needed to drop them.
const STACK: usize = 256 << 20;
/// The characters that mark answers in a text: they are no characters of any text.
const MARKS: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

/// The tag around answers, which only transformers knows.
static TAG: LazyLock<std::result::Result<Regex, regex::Error>> =
    LazyLock::new(|| Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}"));

/// A slice backwards, which minijinja cannot take of an empty list.
static BACKWARDS: LazyLock<std::result::Result<Regex, regex::Error>> =
    LazyLock::new(|| Regex::new(r"\[\s*:\s*:\s*-\s*1\s*\]"));

/// The chat template of a model, which turns a conversation into text. Needs the feature `tokenizer`.
///
/// It is read from `chat_template.jinja` or, without this file, from `chat_template` in `tokenizer_config.json`: a template, or a list
/// of named ones, of which `default` is used. As in transformers, it knows `messages`, `add_generation_prompt` and the special tokens,
/// and can call `raise_exception` and `strftime_now` (in UTC). `tools` and `documents` are none.
///
/// ```
/// use fp8_hf::data::ChatTemplate;
/// use serde_json::json;
/// let place = std::env::temp_dir().join(format!("fp8-template-{}", std::process::id()));
/// std::fs::create_dir(&place)?;
/// let text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}\
///     {% if add_generation_prompt %}<assistant>{% endif %}";
/// std::fs::write(place.join("chat_template.jinja"), text)?;
/// std::fs::write(place.join("tokenizer_config.json"), r#"{"eos_token": "</s>"}"#)?;
/// let template = ChatTemplate::open(&place)?.expect("it is there");
/// let messages = [json!({"role": "user", "content": "17 · 3?"}), json!({"role": "assistant", "content": "51"})];
/// assert_eq!(template.render(&messages[..1], true)?, "<user>17 · 3?</s><assistant>");
/// let (text, answers) = template.conversation(&messages)?;
/// assert_eq!(text[answers[0].clone()], *"51</s>");
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special: SpecialTokens,
    /// The file with the template.
    path: PathBuf,
    /// The text of the template.
    source: String,
    /// Whether the template marks answers by itself.
    marks_answers: bool,
}

/// The most bytes of a text.
const MOST: usize = 64 << 20;

/// A text that is being written, up to a size that no conversation has.
#[derive(Debug, Default)]
struct Bounded {
    bytes: Vec<u8>,
    is_full: bool,
}

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + bytes.len() > MOST {
            self.is_full = true;
            return Err(std::io::Error::other("the text is too long"));
        }
        self.bytes.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A conversation as text, and its answers as ranges of bytes.
pub(super) type Conversation = (String, Vec<Range<usize>>);

/// The reason why a conversation gives no text in which its answers are known.
#[derive(Debug, PartialEq)]
pub(super) enum Refusal {
    /// The template renders earlier messages differently once later ones follow, or cannot render the prompt of an answer.
    Changes,
    /// Another one.
    Other(String),
}

impl ChatTemplate {
    /// Reads the template of a folder, or returns `None` if it has none.
    ///
    /// # Errors
    /// [`Error::File`] for a file that cannot be read, and a template that is no Jinja; it names the file, and the line in the
    /// template.
    pub fn open(folder: &Path) -> Result<Option<Self>> {
        let Some((path, source)) = find(folder)? else { return Ok(None) };
        // As Jinja reads them.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let problem = |problem: String| Error::File { path: path.clone(), problem };
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        functions::add_to(&mut environment);
        environment.add_function(GENERATION, marked);
        let tag = TAG.as_ref().map_err(|error| problem(error.to_string()))?;
        let marks_answers = tag.is_match(&source);
        let replaced = tag.replace_all(&source, |found: &regex::Captures<'_>| {
            let inner =
                if found.get(2).is_some() { "endcall".into() } else { format!("call {GENERATION}()") };
            format!("{{%{} {inner} {}%}}", &found[1], &found[3])
        });
        let backwards = BACKWARDS.as_ref().map_err(|error| problem(error.to_string()))?;
        let text = backwards.replace_all(&replaced, format!(".{REVERSED}()")).into_owned();
        let add = || {
            environment.add_template_owned(NAME, text).map_err(|error| {
                let line = error.line().map(|line| format!("line {line}: ")).unwrap_or_default();
                let detail = error.detail().map_or_else(|| error.kind().to_string(), in_one_line);
                format!("{line}not a template that can be read: {detail}")
            })
        };
        with_stack(add).and_then(|added| added).map_err(problem)?;
        let special = SpecialTokens::read(folder)?;
        Ok(Some(Self { environment, special, path, source, marks_answers }))
    }

    /// Renders messages, which are objects with `role`, `content` and whatever else the template reads. With
    /// `add_generation_prompt`, the text ends with the start of an answer.
    ///
    /// # Errors
    /// [`Error::File`] with the message of `raise_exception`, by which templates refuse what they do not know, or with that of an
    /// expression that fails; a template that takes more than a million steps.
    pub fn render(&self, messages: &[serde_json::Value], add_generation_prompt: bool) -> Result<String> {
        let messages = values(messages);
        let rendered = with_stack(|| self.text_of(&messages, add_generation_prompt)).and_then(|text| text);
        let mut text = rendered.map_err(|problem| self.problem(problem))?;
        text.retain(|c| !MARKS.contains(&c));
        Ok(text)
    }

    /// Renders a conversation, and returns its answers as ranges of bytes, in order.
    ///
    /// An answer is the text in `{% generation %}`. In templates without it, an answer is the text from the end of what the messages
    /// before it give, with `add_generation_prompt`, to the end of what the messages up to it give; or to the special token that
    /// ends it, if only white space follows that.
    ///
    /// # Errors
    /// As [`render`](Self::render), and a template that renders earlier messages differently once later ones follow.
    pub fn conversation(&self, messages: &[serde_json::Value]) -> Result<(String, Vec<Range<usize>>)> {
        self.answers_of(&values(messages)).map_err(|refusal| self.problem(refusal.text()))
    }

    /// Does as [`conversation`](Self::conversation).
    pub(super) fn answers_of(&self, messages: &[Value]) -> Result<Conversation, Refusal> {
        let run = || {
            let whole = self.text_of(messages, false).map_err(Refusal::Other)?;
            if self.marks_answers {
                return unmarked(&whole);
            }
            let mut answers = Vec::new();
            for index in answers_in(messages) {
                let text = match index + 1 == messages.len() {
                    true => None,
                    false => Some(self.text_of(&messages[..=index], false).map_err(|_| Refusal::Changes)?),
                };
                let text = text.as_deref().unwrap_or(&whole);
                let answer = self.answer(messages, index, text).ok_or(Refusal::Changes)?;
                if !whole.starts_with(text) {
                    return Err(Refusal::Changes);
                }
                answers.push(answer);
            }
            Ok((whole, answers))
        };
        with_stack(run).map_err(Refusal::Other)?
    }

    /// Renders the conversation up to each answer. Those whose prompt is not the start of their text are left out.
    pub(super) fn each_answer_of(&self, messages: &[Value]) -> Result<Vec<Conversation>, String> {
        let run = || {
            let of = |index: usize| {
                let text = self.text_of(&messages[..=index], false).ok()?;
                let answer = self.answer(messages, index, &text)?;
                Some((text, vec![answer]))
            };
            answers_in(messages).filter_map(of).collect()
        };
        with_stack(run)
    }

    /// Renders a conversation whose answers do not matter.
    pub(super) fn whole_of(&self, messages: &[Value]) -> Result<String, String> {
        let mut text = with_stack(|| self.text_of(messages, false)).and_then(|text| text)?;
        text.retain(|c| !MARKS.contains(&c));
        Ok(text)
    }

    /// Returns the text of the template and the special tokens that it can read, for a digest.
    pub(super) fn identity(&self) -> String {
        format!("{}\n{:?}", self.source, self.special)
    }

    /// Finds the answer `index` in the text of the messages up to it.
    fn answer(&self, messages: &[Value], index: usize, text: &str) -> Option<Range<usize>> {
        let prompt = self.text_of(&messages[..index], true).ok()?;
        if !text.starts_with(&prompt) {
            return None;
        }
        let trimmed = text.trim_end();
        let is_ended = trimmed.len() > prompt.len() && self.special.is_end_of(trimmed);
        Some(prompt.len()..if is_ended { trimmed.len() } else { text.len() })
    }

    /// Renders messages, with marks around answers if the template has them.
    fn text_of(&self, messages: &[Value], add_generation_prompt: bool) -> Result<String, String> {
        let special = self.special.named.iter().map(|(name, token)| (name.as_str(), Value::from(token)));
        let given = [
            ("messages", Value::from(messages.to_vec())),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
        ];
        let context: Value = special.chain(given).collect();
        let template = self.environment.get_template(NAME).map_err(|error| error.to_string())?;
        let mut text = Bounded::default();
        let rendered = template.render_captured_to(context, &mut text).map(drop);
        if text.is_full {
            return Err(format!("the chat template makes a text of more than {} MiB of it", MOST >> 20));
        }
        rendered.map_err(|error| self.explained(&error))?;
        String::from_utf8(text.bytes).map_err(|error| error.to_string())
    }

    /// Says in one sentence why the template gives no text.
    fn explained(&self, error: &minijinja::Error) -> String {
        if error.kind() == ErrorKind::OutOfFuel {
            return format!("the chat template takes more than {FUEL} steps for it");
        }
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            if let Some(Raised(text)) = cause.downcast_ref() {
                return format!("the chat template refuses it: {}", in_one_line(text));
            }
            source = cause.source();
        }
        let line = error.line().map(|line| format!(" line {line}")).unwrap_or_default();
        let detail = error.detail().map(|detail| format!(": {}", in_one_line(detail))).unwrap_or_default();
        let file = self.path.file_name().unwrap_or_default().display();
        format!("the chat template fails ({file}{line}): {}{detail}", error.kind())
    }

    fn problem(&self, problem: String) -> Error {
        Error::File { path: self.path.clone(), problem }
    }
}

impl Refusal {
    pub(super) fn text(self) -> String {
        match self {
            Self::Changes => "the chat template renders earlier messages differently once later ones follow, or cannot render the \
                              prompt of an answer alone"
                .to_owned(),
            Self::Other(text) => text,
        }
    }
}

/// Returns the template of a folder, and the file that it is in.
fn find(folder: &Path) -> Result<Option<(PathBuf, String)>> {
    let path = folder.join(FILE);
    if exists(&path) {
        let text = read_text(&path)?;
        return Ok(Some((path, text)));
    }
    for file in [CONFIG, OLDER] {
        let map = object(folder, file)?;
        let path = folder.join(file);
        match map.get(FIELD) {
            None | Some(serde_json::Value::Null) => {}
            Some(serde_json::Value::String(text)) => return Ok(Some((path, text.clone()))),
            Some(serde_json::Value::Array(named)) => {
                let default = named.iter().find(|one| one.get("name").is_some_and(|name| name == "default"));
                return match default.and_then(|one| one.get("template")?.as_str()) {
                    Some(text) => Ok(Some((path, text.to_owned()))),
                    None => {
                        let problem = format!("`{FIELD}` has no template with the name `default`");
                        Err(Error::File { path, problem })
                    }
                };
            }
            Some(_) => {
                let problem = format!("`{FIELD}` is no template: expected a string, or a list of named ones");
                return Err(Error::File { path, problem });
            }
        }
    }
    Ok(None)
}

/// Returns the places of the answers.
fn answers_in(messages: &[Value]) -> impl Iterator<Item = usize> {
    let is_answer =
        |message: &Value| message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"));
    messages.iter().enumerate().filter(move |(_, message)| is_answer(message)).map(|(index, _)| index)
}

fn values(messages: &[serde_json::Value]) -> Vec<Value> {
    messages.iter().map(Value::from_serialize).collect()
}

/// The function that stands for `{% generation %}`: the text of its block between marks.
fn marked(state: &State<'_, '_>, kwargs: Kwargs) -> Result<String, minijinja::Error> {
    let caller: Value = kwargs.get("caller")?;
    let text = caller.call(state, &[])?;
    let [start, end] = MARKS;
    Ok(format!("{start}{text}{end}"))
}

/// Takes the marks out of a text.
fn unmarked(text: &str) -> Result<Conversation, Refusal> {
    let (mut plain, mut answers, mut start) = (String::with_capacity(text.len()), Vec::new(), None);
    let [open, close] = MARKS;
    for c in text.chars() {
        match c {
            _ if c == open && start.is_none() => start = Some(plain.len()),
            _ if c == close && start.is_some() => {
                answers.extend(start.take().map(|start| start..plain.len()));
            }
            _ if c == open || c == close => {
                let text = "`{% generation %}` in the chat template is nested, or a message has characters that mark answers";
                return Err(Refusal::Other(text.to_owned()));
            }
            _ => plain.push(c),
        }
    }
    match answers.is_empty() {
        true => Err(Refusal::Other("the chat template marks no answer by `{% generation %}`".to_owned())),
        false => Ok((plain, answers)),
    }
}

fn in_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

thread_local! {
    /// Whether this thread has a large stack.
    static IS_LARGE: Cell<bool> = const { Cell::new(false) };
}

/// Starts threads on which conversations are rendered without starting another thread for each.
pub(super) fn threads() -> std::result::Result<rayon::ThreadPool, rayon::ThreadPoolBuildError> {
    let mark = |_| IS_LARGE.set(true);
    rayon::ThreadPoolBuilder::new().stack_size(STACK).start_handler(mark).build()
}

/// Runs a function on a thread with a large stack. A panic becomes an error.
fn with_stack<T: Send>(run: impl FnOnce() -> T + Send) -> Result<T, String> {
    let stopped = "the chat template contradicts itself: it stopped";
    if IS_LARGE.get() {
        return catch_unwind(AssertUnwindSafe(run)).map_err(|_| stopped.to_owned());
    }
    std::thread::scope(|scope| {
        let started = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, run);
        let started = started.map_err(|error| format!("no thread for the chat template: {error}"))?;
        started.join().map_err(|_| stopped.to_owned())
    })
}
