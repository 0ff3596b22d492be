//! An f32 sum over TCP: how long it takes, and how much CPU time on all ranks together.
//!
//! Every rank is a process of its own. With `--gloo PYTHON`, an interpreter that can import torch, gloo reduces the same bytes; the
//! contenders take turns, and the medians over rounds are compared. `raw` is the exchange of all bytes between two processes,
//! and the addition, without anything around it.
//!
//!     cargo bench -p fp8-dist --bench tcp -- --mib 64 --gloo target/peers/bin/python
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program for the terminal, which ends if something fails"
)]

use fp8_dist::{Environment, ReduceOp, tcp};
use fp8_kernels::{Device, Tensor};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

const DEADLINE: Duration = Duration::from_secs(60);
/// Reductions of each process that are not measured, and those that are.
const WARM: usize = 2;
const MEASURED: usize = 7;

/// A contender: a kind of reduction.
const CONTENDERS: [&str; 4] = ["in place", "returned", "raw", "gloo"];

struct Options {
    mib: f64,
    rounds: usize,
    gloo: Option<PathBuf>,
}

fn main() -> ExitCode {
    if let Ok(contender) = env::var("FP8_BENCH_CONTENDER") {
        rank(&contender);
        return ExitCode::SUCCESS;
    }
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("{} MiB of f32, medians of {} rounds of {MEASURED} sums, in ms", options.mib, options.rounds);
    println!("{:>5}  {:<8}  {:>7}  {:>7}  {:>9}  {:>9}", "ranks", "", "wall", "CPU", "÷ gloo", "CPU ÷ gloo");
    for ranks in [2, 4] {
        compare(ranks, &options);
    }
    ExitCode::SUCCESS
}

/// Reads the arguments.
fn options() -> Result<Options, String> {
    let arguments: Vec<String> = env::args().collect();
    let value = |name: &str| match arguments.iter().position(|argument| argument == name) {
        Some(at) => match arguments.get(at + 1) {
            Some(value) => Ok(Some(value.clone())),
            None => Err(format!("{name} needs a value")),
        },
        None => Ok(None),
    };
    let wrong = |name: &str, value: &str| format!("{name} {value}: expected a number greater than 0");
    // Without `cargo bench`, as a test: once, with few bytes.
    let is_bench = arguments.iter().any(|argument| argument == "--bench");
    let (mut mib, mut rounds) = if is_bench { (64.0, 5) } else { (0.25, 1) };
    if let Some(text) = value("--mib")? {
        mib = text.parse().ok().filter(|mib| *mib > 0.0).ok_or_else(|| wrong("--mib", &text))?;
    }
    if let Some(text) = value("--rounds")? {
        rounds = text.parse().ok().filter(|rounds| *rounds > 0).ok_or_else(|| wrong("--rounds", &text))?;
    }
    let gloo = value("--gloo")?.map(PathBuf::from);
    if let Some(python) = &gloo {
        let has_torch = Command::new(python).args(["-c", "import torch"]).stderr(Stdio::null()).status();
        if !has_torch.is_ok_and(|status| status.success()) {
            return Err(format!("--gloo {}: expected a Python that can import torch", python.display()));
        }
    }
    Ok(Options { mib, rounds, gloo })
}

fn compare(ranks: usize, options: &Options) {
    let contenders = CONTENDERS.iter().filter(|&&contender| match contender {
        "gloo" => options.gloo.is_some(),
        "raw" => ranks == 2,
        _ => true,
    });
    let contenders: Vec<&str> = contenders.copied().collect();
    let mut times: Vec<Vec<[f64; 2]>> = vec![Vec::new(); contenders.len()];
    for _ in 0..options.rounds {
        for (contender, times) in contenders.iter().zip(&mut times) {
            times.push(run(contender, ranks, options));
        }
    }
    let medians: Vec<[f64; 2]> = times
        .iter()
        .map(|times| [0, 1].map(|column| median(times.iter().map(|time| time[column]).collect())))
        .collect();
    let gloo = contenders.iter().position(|&contender| contender == "gloo").map(|at| medians[at]);
    for (contender, [wall, cpu]) in contenders.iter().zip(&medians) {
        let ratio = |time: f64, column: usize| {
            gloo.map_or("–".to_owned(), |gloo| format!("{:.2}", time / gloo[column]))
        };
        println!(
            "{ranks:>5}  {contender:<8}  {wall:>7.1}  {cpu:>7.1}  {:>9}  {:>9}",
            ratio(*wall, 0),
            ratio(*cpu, 1)
        );
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Runs the ranks of one contender. Returns rank 0's median time, and the CPU time of all ranks.
fn run(contender: &str, ranks: usize, options: &Options) -> [f64; 2] {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let mut command = match (contender, &options.gloo) {
            ("gloo", Some(python)) => {
                let mut command = Command::new(python);
                command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/gloo.py"));
                command
            }
            _ => Command::new(env::current_exe().unwrap()),
        };
        command
            .env("FP8_BENCH_CONTENDER", contender)
            .env("FP8_BENCH_MIB", options.mib.to_string())
            .env("FP8_BENCH_SUMS", format!("{WARM} {MEASURED}"))
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("OMP_NUM_THREADS", "1")
            .env("GLOO_SOCKET_IFNAME", "lo")
            .stdout(Stdio::piped());
        command.spawn().unwrap()
    };
    let processes: Vec<_> = (0..ranks).map(start).collect();
    let outputs: Vec<_> = processes.into_iter().map(|process| process.wait_with_output().unwrap()).collect();
    let numbers: Vec<Vec<f64>> = outputs
        .iter()
        .map(|output| {
            assert!(output.status.success(), "{contender}: {}", output.status);
            let text = String::from_utf8_lossy(&output.stdout);
            text.split_whitespace().map(|number| number.parse().unwrap()).collect()
        })
        .collect();
    [numbers[0][0], numbers.iter().map(|numbers| numbers[1]).sum()]
}

/// The CPU time of this process's threads so far, in ms; 0 where the system does not say.
fn cpu_ms() -> f64 {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else { return 0.0 };
    let times = tasks.flatten().filter_map(|task| {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    times.sum::<f64>() / 1e6
}

/// A rank: prints the medians of the time and the CPU time of a sum.
fn rank(contender: &str) {
    let number = |name: &str| env::var(name).unwrap().parse::<usize>().unwrap();
    let (rank, world_size) = (number("RANK"), number("WORLD_SIZE"));
    let environment = Environment {
        rank,
        world_size,
        exact_port: true,
        run_id: "bench".to_owned(),
        ..Environment::on_this_machine(number("MASTER_PORT") as u16)
    };
    let group = tcp("bench", &environment, DEADLINE).unwrap();
    let len = (env::var("FP8_BENCH_MIB").unwrap().parse::<f64>().unwrap() * f64::from(1 << 18)) as usize;
    let value = |index: usize, rank: usize| ((index * 7 + rank * 13) % 1000) as f32;
    let data: Vec<f32> = (0..len).map(|index| value(index, rank)).collect();
    let peer = (contender == "raw").then(|| connect(rank, &environment));
    let mut received = vec![0.0; if contender == "raw" { len } else { 0 }];
    let mut times = Vec::new();
    for _ in 0..WARM + MEASURED {
        let mut x = Tensor::from_vec(data.clone(), [len], &Device::cpu()).unwrap();
        group.barrier().unwrap();
        let (start, cpu) = (Instant::now(), cpu_ms());
        match contender {
            "returned" => x = group.all_reduce("x", &x, ReduceOp::Sum).unwrap(),
            "raw" => exchange(peer.as_ref().unwrap(), x.as_mut_slice("x").unwrap(), &mut received),
            _ => group.all_reduce_in_place("x", &mut x, ReduceOp::Sum).unwrap(),
        }
        times.push([start.elapsed().as_secs_f64() * 1e3, cpu_ms() - cpu]);
        let sum = |index| (0..world_size).map(|rank| value(index, rank)).sum::<f32>();
        let found: &[f32] = x.as_slice().unwrap();
        assert!((0..len).step_by(97).all(|index| found[index] == sum(index)), "a wrong sum");
    }
    let times = times.split_off(WARM);
    println!(
        "{} {}",
        median(times.iter().map(|t| t[0]).collect()),
        median(times.iter().map(|t| t[1]).collect())
    );
    group.barrier().unwrap();
}

/// Connects two ranks.
fn connect(rank: usize, environment: &Environment) -> TcpStream {
    let address = ("127.0.0.1", environment.master_port);
    let stream = if rank == 0 {
        TcpListener::bind(address).unwrap().accept().unwrap().0
    } else {
        loop {
            match TcpStream::connect(address) {
                Ok(stream) => break stream,
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    };
    stream.set_nodelay(true).unwrap();
    stream
}

/// Sends and receives everything at once, and adds.
fn exchange(mut peer: &TcpStream, x: &mut [f32], received: &mut [f32]) {
    thread::scope(|scope| {
        let x = &*x;
        scope.spawn(move || (&mut &*peer).write_all(bytemuck::cast_slice(x)).unwrap());
        peer.read_exact(bytemuck::cast_slice_mut(received)).unwrap();
    });
    x.iter_mut().zip(received).for_each(|(sum, value)| *sum += *value);
}
