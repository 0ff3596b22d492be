//! Events: what a subscriber is told when groups form and fail.

use crate::{LONG, environments, speak};
use fp8_dist::{ProcessGroup, local, tcp};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, Once};
use std::thread;
use std::time::{Duration, Instant};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// An event: its level, its target, and its fields with the message among them.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    level: Level,
    target: String,
    fields: BTreeMap<&'static str, String>,
}

static SEEN: Mutex<Vec<Seen>> = Mutex::new(Vec::new());

/// Keeps the events of this crate.
struct Recorder;

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("fp8_dist")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let (level, target) = (*event.metadata().level(), event.metadata().target().to_owned());
        SEEN.lock().unwrap().push(Seen { level, target, fields: fields.0 });
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

fn record() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| tracing::subscriber::set_global_default(Recorder).unwrap());
}

/// Waits for `count` events of `group`: some come from threads of the crate. Returns all of them.
fn seen(group: &str, count: usize) -> Vec<Seen> {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let all = SEEN.lock().unwrap().clone();
        let own: Vec<_> = all.into_iter().filter(|seen| seen.fields["group"] == group).collect();
        if own.len() >= count || Instant::now() > until {
            return own;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn event(level: Level, target: &str, fields: &[(&'static str, &str)]) -> Seen {
    let fields = fields.iter().map(|&(name, value)| (name, value.to_owned())).collect();
    Seen { level, target: target.to_owned(), fields }
}

fn lost(group: &str, rank: &str, world_size: &str, cause: &str) -> Seen {
    let fields = [
        ("message", "rank lost"),
        ("group", group),
        ("rank", rank),
        ("world_size", world_size),
        ("cause", cause),
    ];
    event(Level::WARN, "fp8_dist::events", &fields)
}

#[test]
fn a_group_of_threads_tells_that_it_forms_and_whom_it_loses() {
    record();
    let mut ranks = local("events threads", 3, LONG).unwrap();
    ranks.truncate(1); // ranks 1 and 2 leave
    ranks[0].barrier().unwrap_err();
    ranks[0].poison("a later failure");
    let formed = [("message", "group formed"), ("group", "events threads"), ("world_size", "3")];
    let cause = "ranks 1 and 2 left the group: every rank must make the same number of calls";
    let expected = [
        event(Level::INFO, "fp8_dist::local", &formed),
        lost("events threads", "1", "3", cause),
        lost("events threads", "2", "3", cause),
    ];
    assert_eq!(seen("events threads", 3), expected);
}

#[test]
fn ranks_that_disagree_are_a_failure_of_no_single_rank() {
    record();
    let ranks = local("events calls", 2, LONG).unwrap();
    thread::scope(|scope| {
        for (rank, group) in ranks.into_iter().enumerate() {
            scope.spawn(move || {
                let names: &[Arc<str>] = if rank == 0 { &[] } else { &["a".into()] };
                group.agree_on_names("arena", names).unwrap_err();
            });
        }
    });
    let seen = seen("events calls", 2);
    let cause = "name 0 is `a` on rank 1 and missing on rank 0: build the same model on all ranks";
    let fields =
        [("message", "group failed"), ("group", "events calls"), ("world_size", "2"), ("cause", cause)];
    assert_eq!(seen[1..], [event(Level::WARN, "fp8_dist::events", &fields)]);
}

#[test]
fn processes_tell_who_joins_and_who_is_lost() {
    record();
    let id = "events processes";
    let environments = environments(2);
    let address = format!("127.0.0.1:{}", environments[0].master_port);
    let host = environments[0].clone();
    let host = thread::spawn(move || tcp(id, &host, LONG).unwrap());
    let guest = speak::join(id, &environments[1]);
    let peer = guest.local_addr().unwrap().to_string();
    let host: Arc<dyn ProcessGroup> = host.join().unwrap();
    drop(guest); // without a word: as when its process is killed
    let error = host.barrier().unwrap_err();
    let fields = [("group", id), ("world_size", "2")];
    let joined = [("message", "rank joined"), ("rank", "1"), ("address", &peer)];
    let formed = [("message", "group formed"), ("rank", "0"), ("address", &address)];
    let expected = [
        event(Level::INFO, "fp8_dist::rendezvous::host", &[fields.as_slice(), &joined].concat()),
        event(Level::INFO, "fp8_dist::tcp", &[fields.as_slice(), &formed].concat()),
        lost(id, "1", "2", &error.failure().unwrap().to_string()),
    ];
    assert_eq!(seen(id, 3), expected);
}

#[test]
fn each_process_tells_of_a_failure_once() {
    record();
    let id = "events left";
    let mut groups = thread::scope(|scope| {
        let join = |environment| scope.spawn(move || tcp(id, &environment, LONG).unwrap());
        let threads: Vec<_> = environments(2).into_iter().map(join).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let guest = groups.pop().unwrap();
    guest.poison("enough");
    guest.barrier().unwrap_err();
    groups[0].barrier().unwrap_err();
    let seen = seen(id, 5);
    // Both ranks are in this process: each tells of the same failure once.
    let warnings: Vec<_> = seen.iter().filter(|seen| seen.level == Level::WARN).cloned().collect();
    assert_eq!(warnings, [(); 2].map(|()| lost(id, "1", "2", "rank 1 gave up: enough")), "{seen:?}");
    assert_eq!(seen.len(), 5, "{seen:?}"); // one joined, two formed
}
