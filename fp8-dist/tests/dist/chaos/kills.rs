//! Processes that are killed, or stopped, while their group forms or works.

use super::{Draw, attack, exchange, joining};
use crate::{Group, child, environments, f32s};
use fp8_dist::{Environment, ReduceOp, tcp};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(3);
/// Longer than a rank that keeps its deadlines can take from its start to its end, whatever happens to others.
const HANG: Duration = Duration::from_secs(30);

/// A call of each kind in turn: sums, exchanges of rows and messages around the ranks, small ones and large ones.
fn call(group: &Group, number: usize) -> fp8_dist::Result<()> {
    let (rank, ranks) = (group.rank(), group.world_size());
    // Those that pass through rank 0, and those that go directly.
    let len = [5000, 300_000][number / 3 % 2];
    match number % 3 {
        0 => {
            let sum = group.all_reduce("x", &f32s(&vec![1.0; len], &[len]), ReduceOp::Sum)?;
            assert_eq!(sum.as_slice::<f32>().unwrap()[17], ranks as f32);
        }
        1 => {
            let rows = vec![len / 100 / ranks; ranks];
            let all = rows[0] * ranks;
            let x = f32s(&vec![rank as f32; all * 100], &[all, 100]);
            let (found, _) = group.all_to_all("x", &x, &rows)?;
            assert_eq!(found.as_slice::<f32>().unwrap()[all * 100 - 1], (ranks - 1) as f32);
        }
        _ => {
            let mut x = f32s(&vec![rank as f32; len], &[len]);
            group.send("x", &x, (rank + 1) % ranks)?;
            let from = (rank + ranks - 1) % ranks;
            group.recv("x", &mut x, from)?;
            assert_eq!(x.as_slice::<f32>().unwrap()[17], from as f32);
        }
    }
    Ok(())
}

/// Calls until something fails, and says what, and how long the call took.
#[test]
fn a_worker() {
    if !child::is_child() {
        return;
    }
    let environment = Environment::read().unwrap();
    let fail = |during: &str, started: Instant, error: &dyn std::fmt::Display| {
        child::answer(format!("failed {during} {} {error}", started.elapsed().as_millis()));
    };
    let started = Instant::now();
    let group = match tcp("dp", &environment, DEADLINE) {
        Ok(group) => group,
        Err(error) => return fail("joining", started, &error),
    };
    child::answer("joined");
    let mut draw = Draw(environment.rank as u64);
    for number in 0.. {
        let started = Instant::now();
        if let Err(error) = call(&group, number) {
            return fail("exchange", started, &error);
        }
        // Between the collectives.
        thread::sleep(draw.ms(8));
    }
}

/// A rank that is running, and what it says.
struct Rank {
    child: Child,
    lines: Receiver<String>,
}

impl Rank {
    fn start(environment: &Environment) -> Self {
        let mut child = child::start("chaos::kills::a_worker", environment, &[]);
        let (send, lines) = mpsc::channel();
        let (output, errors) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let forward = |prefix: &'static str, from: Box<dyn std::io::Read + Send>| {
            let send = send.clone();
            thread::spawn(move || {
                for line in BufReader::new(from).lines().map_while(Result::ok) {
                    let _ = send.send(format!("{prefix}{line}"));
                }
            });
        };
        forward("", Box::new(output));
        forward("stderr: ", Box::new(errors));
        Self { child, lines }
    }

    fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    /// The next line that begins with a word of the worker's.
    fn next(&self, until: Instant) -> Option<String> {
        loop {
            let line = self.lines.recv_timeout(until.saturating_duration_since(Instant::now())).ok()?;
            if line.contains("panicked") {
                return Some(line);
            }
            if let Some((_, words)) = line.split_once("answer ") {
                return Some(words.to_owned());
            }
        }
    }

    /// Waits for the rank to fail and returns the call that failed, the duration of the call and the error message.
    fn end(&self) -> Result<(String, Duration, String), String> {
        let until = Instant::now() + HANG;
        let line = loop {
            match self.next(until) {
                Some(line) if line == "joined" => {}
                Some(line) => break line,
                None => return Err(format!("it did not end within {HANG:?}, or without a word")),
            }
        };
        let mut words = line.splitn(4, ' ');
        let (Some("failed"), Some(during), Some(ms), Some(error)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(line);
        };
        let took = Duration::from_millis(ms.parse().unwrap());
        let limit = if during == "joining" { joining(DEADLINE) } else { exchange(DEADLINE) };
        if took > limit {
            return Err(format!("{during} took {took:?}: {error}"));
        }
        Ok((during.to_owned(), took, error.to_owned()))
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_process_that_is_killed_or_stopped_is_an_error_on_all_others_in_time() {
    attack("kills and stops", [110, 4], 2, |mut draw| {
        let ranks = draw.pick(&[3, 4, 8]);
        let (victim, signal, forming) =
            (draw.below(ranks), draw.pick(&["-KILL", "-STOP"]), draw.below(2) == 0);
        let all: Vec<Rank> = environments(ranks).iter().map(Rank::start).collect();
        if !forming {
            for rank in &all {
                match rank.next(Instant::now() + HANG) {
                    Some(line) if line == "joined" => {}
                    other => return Err(format!("the group did not form: {other:?}")),
                }
            }
        }
        thread::sleep(draw.ms(150));
        all[victim].signal(signal);
        let what = format!("{signal} of rank {victim} of {ranks}, forming: {forming}");
        for rank in (0..ranks).filter(|rank| *rank != victim) {
            let (during, _, error) =
                all[rank].end().map_err(|error| format!("{what}: rank {rank}: {error}"))?;
            let (lost, late) =
                (format!("rank {victim} is lost"), format!("rank {victim} did not arrive within"));
            // Of a group that has not formed a dead process is one that did not come.
            let is_right = match (signal, &*during) {
                ("-KILL", "exchange") => error.contains(&lost),
                ("-KILL", _) => error.contains(&lost) || error.contains(&late),
                _ => error.contains(&late),
            };
            let is_unheard = victim == 0 && error.contains("looking for rank 0");
            if !is_right && !is_unheard {
                return Err(format!("{what}: rank {rank}: {error}"));
            }
        }
        if signal == "-STOP" {
            all[victim].signal("-CONT");
            all[victim].end().map_err(|error| format!("{what}: once it goes on: {error}"))?;
        }
        let moment = if forming { "while forming" } else { "while working" };
        Ok(format!("{} {moment}", if signal == "-KILL" { "killed" } else { "stopped" }))
    });
}
