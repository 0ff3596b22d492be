//! `fp8 launch`: what each process is told, what becomes of its output, and how all end together.
#![cfg(unix)]

use super::{command, run};
use fp8_nn::fp8_dist::{Environment, ReduceOp, tcp};
use fp8_nn::prelude::{Device, Tensor};
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Set in the processes of a test only.
const MARK: &str = "FP8_TEST_LAUNCHED";

fn launch(n: usize, script: &str) -> (i32, Vec<String>, String) {
    let n = n.to_string();
    let (code, out, error) = run(Path::new("/"), ["launch", "-n", &n, "--", "sh", "-c", script]);
    let mut lines: Vec<String> = out.lines().map(str::to_owned).collect();
    lines.sort();
    (code, lines, error)
}

#[test]
fn every_process_is_told_who_it_is() {
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR; [ -n \"$MASTER_PORT\" ] || exit 3";
    let (code, lines, error) = launch(3, script);
    assert_eq!((code, &*error), (0, ""));
    assert_eq!(lines, ["[0] 0 0 3 3 127.0.0.1", "[1] 1 1 3 3 127.0.0.1", "[2] 2 2 3 3 127.0.0.1"]);
    // One run, with a token that only its processes know.
    let (_, lines, _) = launch(2, "echo $TORCHELASTIC_RUN_ID $FP8_DIST_TOKEN $MASTER_PORT");
    let told: Vec<&str> = lines.iter().map(|line| &line[4..]).collect();
    assert_eq!(told[0], told[1]);
    let words: Vec<&str> = told[0].split(' ').collect();
    assert!(words[0].len() == 32 && words[1].len() == 32 && words[0] != words[1], "{told:?}");
}

#[test]
fn lines_stay_whole_and_on_their_stream() {
    let (code, lines, error) =
        launch(4, "for i in 1 2 3; do echo out $i; echo error $i >&2; done; printf end");
    assert_eq!(code, 0);
    let expected = |rank: usize| ["end", "out 1", "out 2", "out 3"].map(|line| format!("[{rank}] {line}"));
    assert_eq!(lines, (0..4).flat_map(expected).collect::<Vec<_>>());
    assert_eq!(error.lines().filter(|line| line.contains("] error ")).count(), 12);
}

#[test]
fn a_process_that_fails_ends_the_others_and_gives_its_exit_code() {
    let started = Instant::now();
    let (code, lines, error) = launch(3, "[ $RANK = 1 ] && exit 7; exec sleep 60");
    assert_eq!((code, lines.len()), (7, 0));
    assert_eq!(error, "error: rank 1 failed: exit status: 7\n");
    // One that a signal has ended.
    let (code, _, error) = launch(2, "[ $RANK = 0 ] && kill -9 $$; exec sleep 60");
    assert_eq!(code, 137);
    assert!(error.starts_with("error: rank 0 failed: signal: 9"), "{error}");
    // One that takes no notice of being asked to end, as the shell does while a child of its own runs.
    let (code, ..) = launch(2, "[ $RANK = 0 ] && exit 5; trap '' TERM; while :; do sleep 1; done");
    assert_eq!(code, 5);
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
}

#[test]
fn what_a_failed_process_leaves_behind_is_ended() {
    let place = tempfile::tempdir().unwrap();
    let script = "(trap '' TERM; while sleep 0.1; do date > $PLACE/alive$RANK; done) & [ $RANK = 0 ] && exit 4; exec sleep 60";
    let output = command(place.path())
        .args(["launch", "-n", "2", "--", "sh", "-c", script])
        .env("PLACE", place.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(4));
    for rank in 0..2 {
        let _ = std::fs::remove_file(place.path().join(format!("alive{rank}")));
    }
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "processes live on");
}

#[test]
fn processes_that_do_not_heed_signals_are_killed_by_the_third() {
    let script = "trap '' INT; echo ready; while :; do sleep 0.05; done";
    let mut child = command(Path::new("/"))
        .args(["launch", "-n", "1", "--", "sh", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    // Signals that come before the last one was taken count as one.
    let (started, mut sent) = (Instant::now(), 0);
    while child.try_wait().unwrap().is_none() && started.elapsed() < Duration::from_secs(60) {
        let _ = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        sent += 1;
        std::thread::sleep(Duration::from_millis(200));
    }
    let _ = child.kill();
    assert_eq!(child.wait().unwrap().code(), Some(137));
    assert!(sent >= 3, "{sent}");
}

#[test]
fn a_signal_is_passed_on_once_and_all_end_in_their_own_time() {
    for signal in ["INT", "TERM"] {
        // Rank 1 needs longer than rank 0, and both have an exit code of their own.
        let script = format!(
            "trap 'echo caught; sleep 0.$RANK; echo saved; exit 13$RANK' {signal}; echo ready; while :; do sleep 0.05; done"
        );
        let mut child = command(Path::new("/"))
            .args(["launch", "-n", "2", "--", "sh", "-c", &script])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut lines = Vec::new();
        while lines.len() < 2 {
            let mut line = String::new();
            out.read_line(&mut line).unwrap();
            assert!(line.contains("ready"), "{line}");
            lines.push(line);
        }
        let sent =
            Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        let mut error = String::new();
        child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
        // The shell says that its `sleep` was terminated, too; fp8 has nothing to add.
        assert_eq!(
            (child.wait().unwrap().code(), error.contains("error:")),
            (Some(130), false),
            "{rest}{error}"
        );
        let count = |word: &str| rest.matches(word).count();
        assert_eq!((count("caught"), count("saved")), (2, 2), "{rest}");
    }
}

#[test]
fn processes_form_a_group_without_further_settings() {
    let program = std::env::current_exe().unwrap();
    let name = "launching::a_process_of_a_group";
    let output = command(Path::new("/"))
        .args(["launch", "-n", "4", "--"])
        .arg(program)
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(MARK, "1")
        // Left by something else.
        .env("OMPI_COMM_WORLD_RANK", "0")
        .env("OMPI_COMM_WORLD_SIZE", "1")
        .output()
        .unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{out}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(out.matches("sum 6").count(), 4, "{out}");
}

/// Not a test by itself: what each process of the test above does.
#[test]
#[expect(clippy::print_stdout, reason = "how a process answers")]
fn a_process_of_a_group() {
    if std::env::var_os(MARK).is_none() {
        return;
    }
    let environment = Environment::detect().unwrap();
    let group = tcp("world", &environment, Duration::from_secs(30)).unwrap();
    let x = Tensor::scalar(group.rank() as f32, &Device::cpu()).unwrap();
    println!("sum {}", group.all_reduce("ranks", &x, ReduceOp::Sum).unwrap().item().unwrap());
}

#[test]
fn the_dashes_before_a_command_may_be_left_out() {
    let (code, out, error) = run(Path::new("/"), ["launch", "-n", "1", "printf", "%s\\n", "-n", "--", "x"]);
    assert_eq!((code, &*out, &*error), (0, "[0] -n\n[0] --\n[0] x\n", ""));
    let (code, _, error) = run(Path::new("/"), ["launch", "--nn", "1", "true"]);
    assert_eq!((code, error.contains("unknown option --nn")), (2, true), "{error}");
}

#[test]
fn fp8_is_this_program() {
    let (code, out, error) = run(Path::new("/"), ["launch", "-n", "2", "--", "fp8", "--version"]);
    assert_eq!((code, &*error), (0, ""));
    assert_eq!(out.matches("] fp8 ").count(), 2, "{out}");
}

#[test]
fn mistakes() {
    let error = |line: &str| run(Path::new("/"), line.split_whitespace());
    let (code, _, sentence) = error("launch -n 2 -- no-such-program");
    assert_eq!(code, 2);
    assert!(sentence.starts_with("error: cannot start no-such-program: "), "{sentence}");
    for (line, sentence) in [
        ("launch -n 2", "error: <COMMAND>... is missing; --help has an example\n"),
        ("launch -n 0 -- true", "error: -n 0: expected a number from 1 to 1024\n"),
        ("launch -- true", "error: -n <N> is missing; --help has an example\n"),
    ] {
        let found = error(line);
        assert_eq!((found.0, &*found.2), (2, sentence), "{line}");
    }
}
