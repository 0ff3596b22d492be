//! Variables that launchers set, and those that people set wrongly.

use super::*;

const TORCHRUN: [(&str, &str); 5] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("MASTER_ADDR", "node-0"),
    ("MASTER_PORT", "29500"),
];

fn read(changes: &[(&str, Option<&str>)]) -> Result<Environment> {
    Environment::from_variables(|name| {
        let changed = changes.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
        let usual = || TORCHRUN.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
        changed.unwrap_or_else(usual).map(OsString::from)
    })
}

#[test]
fn torchruns_variables() {
    let environment = read(&[]).unwrap();
    let expected = Environment {
        rank: 3,
        world_size: 4,
        local_rank: 1,
        master_addr: "node-0".into(),
        master_port: 29_500,
        exact_port: false,
        run_id: String::new(),
        run_id_variable: "TORCHELASTIC_RUN_ID",
        token: String::new(),
    };
    assert_eq!(environment, expected);
    for id in ["", "night 7"] {
        assert_eq!(read(&[("TORCHELASTIC_RUN_ID", Some(id))]).unwrap().run_id, id);
    }
    let environment = read(&[("FP8_PORT", Some("4000"))]).unwrap();
    assert_eq!((environment.master_port, environment.exact_port), (4000, true));
}

fn detect(variables: &[(&str, &str)]) -> Result<Environment> {
    Environment::detect_from(|name| {
        variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(*value))
    })
}

const MPIRUN: [(&str, &str); 5] = [
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
    ("PMIX_NAMESPACE", "prterun-node-7"),
];
const MPIEXEC: [(&str, &str); 4] =
    [("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "3"), ("MPI_LOCALNRANKS", "4")];
const SRUN: [(&str, &str); 6] = [
    ("SLURM_PROCID", "2"),
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_STEP_NODELIST", "node[07-08]"),
    ("SLURM_JOB_ID", "123"),
    ("SLURM_STEP_ID", "5"),
];

#[test]
fn launchers_are_told_apart() {
    let shown = |variables: &[(&str, &str)]| {
        let found = detect(variables).unwrap();
        (found.rank, found.world_size, found.local_rank, found.master_addr, found.run_id)
    };
    let here = "127.0.0.1".to_owned();
    assert_eq!(shown(&[]), (0, 1, 0, here.clone(), String::new()));
    assert_eq!(shown(&TORCHRUN), (3, 4, 1, "node-0".to_owned(), String::new()));
    assert_eq!(shown(&MPIRUN), (1, 4, 1, here.clone(), "prterun-node-7".to_owned()));
    assert_eq!(shown(&MPIEXEC), (3, 4, 3, here.clone(), String::new()));
    assert_eq!(shown(&SRUN), (2, 4, 0, "node07".to_owned(), "123.5".to_owned()));
    // A batch script of Slurm's, which no srun has started.
    assert_eq!(shown(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]), (0, 1, 0, here, String::new()));
    // mpirun starts its daemons with srun.
    let under_srun = shown(&[&MPIRUN[..], &SRUN].concat());
    assert_eq!((under_srun.0, &*under_srun.4), (1, "prterun-node-7"));
    // srun --mpi=pmi2 sets PMI's variables, too.
    let pmi2 = [&[("PMI_RANK", "2"), ("PMI_SIZE", "4")], &SRUN[..]].concat();
    assert_eq!(shown(&pmi2), shown(&SRUN));
    // Here mpiexec has started its own daemons with it.
    assert_eq!(shown(&[&MPIEXEC[..], &SRUN].concat()).0, 3);
    // torchrun on every machine, by srun or mpirun.
    let torchrun = [&TORCHRUN[..], &[("TORCHELASTIC_RUN_ID", "none")]].concat();
    assert_eq!(shown(&[&torchrun[..], &SRUN].concat()).0, 3);
    assert_eq!(shown(&[&torchrun[..], &MPIRUN].concat()).0, 3);
    // By hand, where both say the same.
    let by_hand = [("RANK", "2"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "node07"), ("MASTER_PORT", "1")];
    assert_eq!(shown(&[&by_hand[..], &SRUN].concat()).0, 2);
}

#[test]
fn variables_say_what_a_launcher_does_not() {
    let more = [("MASTER_ADDR", "10.0.0.7"), ("MASTER_PORT", "4000"), ("FP8_DIST_TOKEN", "hunter2")];
    let found = detect(&[&MPIRUN[..], &more].concat()).unwrap();
    assert_eq!((&*found.master_addr, found.master_port, found.exact_port), ("10.0.0.7", 4000, false));
    assert_eq!(found.token, "hunter2");
    let exact = detect(&[&SRUN[..], &[("FP8_PORT", "4001")]].concat()).unwrap();
    assert_eq!((exact.master_port, exact.exact_port), (4001, true));
    // All ranks of a run compute the same port.
    let port = |rank| detect(&[&[("SLURM_PROCID", rank)], &SRUN[1..]].concat()).unwrap().master_port;
    assert_eq!(port("0"), port("3"));
    assert_eq!(detect(&MPIEXEC).unwrap().master_port, 29_500);
    let local = detect(&[("PMI_RANK", "3"), ("PMI_SIZE", "4"), more[0], ("LOCAL_RANK", "1")]).unwrap();
    assert_eq!(local.local_rank, 1);
}

#[test]
fn variables_that_disagree_or_are_missing_are_named() {
    let error = |variables: &[(&str, &str)]| detect(variables).unwrap_err().to_string();
    let disagree = "two launchers disagree: unset RANK and WORLD_SIZE, or set them in each process";
    assert_eq!(
        error(&[&TORCHRUN[..], &MPIRUN].concat()),
        format!("RANK=3: OMPI_COMM_WORLD_RANK=1: {disagree}")
    );
    let by_hand = [("RANK", "2"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "node07"), ("MASTER_PORT", "1")];
    assert_eq!(
        error(&[&by_hand[..], &SRUN].concat()),
        format!("WORLD_SIZE=8: SLURM_STEP_NUM_TASKS=4: {disagree}")
    );
    let two_machines = [&[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")], &MPIRUN[..3]].concat();
    assert_eq!(
        error(&two_machines),
        "MASTER_ADDR is not set: OMPI_COMM_WORLD_LOCAL_SIZE=2 of 4 processes are on this machine: set it to the machine \
         of rank 0"
    );
    assert_eq!(
        error(&MPIEXEC[..2]),
        "MASTER_ADDR is not set: MPI_LOCALNRANKS is not set, either: set it to the machine of rank 0"
    );
    assert_eq!(error(&[("PMI_RANK", "x"), MPIEXEC[1]]), "PMI_RANK=x: expected an integer from 0 on");
    assert_eq!(error(&[("PMI_RANK", "4"), MPIEXEC[1], MPIEXEC[3]]), "RANK=4: WORLD_SIZE=4: expected 0 to 3");
    assert_eq!(
        error(&[("RANK", "0")]),
        "WORLD_SIZE is not set: start the processes with torchrun, or set the variable as it does"
    );
    assert_eq!(
        error(&[&[("SLURM_STEP_NODELIST", "node[")], &SRUN[..3]].concat()),
        "SLURM_STEP_NODELIST=node[: expected a list of hosts; set MASTER_ADDR to the machine of rank 0"
    );
}

#[test]
fn white_space_around_every_value_is_ignored() {
    let names = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "FP8_PORT",
        "TORCHELASTIC_RUN_ID",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "PMIX_NAMESPACE",
        "FP8_DIST_TOKEN",
    ];
    let value = |name: &str| match TORCHRUN.iter().find(|(known, _)| *known == name) {
        Some((_, value)) => (*value).to_owned(),
        None => "12".to_owned(),
    };
    let of = |padded: &[&str]| {
        let padded: Vec<&str> = padded.to_vec();
        Environment::from_variables(move |name| {
            let value = names.contains(&name).then(|| value(name))?;
            let value = if padded.contains(&name) { format!("\t {value} \r\n") } else { value };
            Some(OsString::from(value))
        })
    };
    let expected = of(&[]).unwrap();
    assert_eq!((&*expected.master_addr, expected.master_port, &*expected.token), ("node-0", 12, "12"));
    for name in names {
        assert_eq!(of(&[name]).unwrap(), expected, "{name}");
    }
    let blank = [" FP8_PORT", " TORCHELASTIC_RUN_ID", " FP8_DIST_TOKEN"];
    let blank: Vec<_> = blank.iter().map(|name| (name.trim(), Some(" \n"))).collect();
    assert_eq!(read(&blank).unwrap(), read(&[]).unwrap());
    let error = read(&[("MASTER_ADDR", Some("  "))]).unwrap_err();
    assert_eq!(error.to_string(), "MASTER_ADDR=: expected a value");
}

#[test]
fn without_a_local_rank_it_is_the_rank() {
    assert_eq!(read(&[("LOCAL_RANK", None)]).unwrap().local_rank, 3);
    assert_eq!(read(&[("LOCAL_RANK", Some("0"))]).unwrap().local_rank, 0);
}

#[test]
fn none_is_no_run_id_and_slurm_or_pmix_may_name_the_job() {
    let torch = |id| ("TORCHELASTIC_RUN_ID", Some(id));
    let slurm = |job, step| [("SLURM_JOB_ID", Some(job)), ("SLURM_STEP_ID", step)];
    let pmix = ("PMIX_NAMESPACE", Some("prterun-7"));
    type Variables<'a> = Vec<(&'a str, Option<&'a str>)>;
    let cases: [(Variables<'_>, &str, &str, bool); 8] = [
        (vec![torch("none")], "TORCHELASTIC_RUN_ID", "", false),
        (vec![torch("none"), pmix], "PMIX_NAMESPACE", "prterun-7", true),
        (vec![torch(""), pmix], "PMIX_NAMESPACE", "prterun-7", true),
        ([vec![torch("none"), pmix], slurm("123", Some("0")).into()].concat(), "SLURM_JOB_ID", "123.0", true),
        // Several may run in one job of Slurm's.
        ([vec![pmix], slurm("123", None).into()].concat(), "SLURM_JOB_ID", "123", false),
        (slurm("123", Some("")).into(), "SLURM_JOB_ID", "123", false),
        (
            [vec![torch("night 7")], slurm("123", Some("0")).into()].concat(),
            "TORCHELASTIC_RUN_ID",
            "night 7",
            true,
        ),
        (vec![("SLURM_STEP_ID", Some("0"))], "TORCHELASTIC_RUN_ID", "", false),
    ];
    for (variables, variable, id, names_one_run) in cases {
        let environment = read(&variables).unwrap();
        assert_eq!((environment.run_id_variable, &*environment.run_id), (variable, id), "{variables:?}");
        assert_eq!(environment.names_one_run(), names_one_run, "{variables:?}");
    }
}

#[test]
fn the_token_is_never_shown() {
    let environment = read(&[("FP8_DIST_TOKEN", Some("hunter2"))]).unwrap();
    assert_eq!(environment.token, "hunter2");
    let shown = format!("{environment:?}{environment:#?}");
    assert!(shown.contains("token: \"hidden\"") && !shown.contains("hunter2"), "{shown}");
    assert!(format!("{:?}", read(&[]).unwrap()).contains("token: \"none\""));
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStringExt;
        let bytes = |name: &str| match name {
            "FP8_DIST_TOKEN" => Some(OsString::from_vec(b"hunter2\xFF".to_vec())),
            _ => TORCHRUN.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()),
        };
        let error = Environment::from_variables(bytes).unwrap_err();
        assert_eq!(error.to_string(), "FP8_DIST_TOKEN=…: expected UTF-8");
        assert!(!format!("{error:?}").contains("hunter2"));
    }
}

#[test]
fn what_is_wrong_is_named() {
    let error = |name, value| read(&[(name, value)]).unwrap_err().to_string();
    for (name, _) in TORCHRUN {
        let expected =
            format!("{name} is not set: start the processes with torchrun, or set the variable as it does");
        if name != "LOCAL_RANK" {
            assert_eq!(error(name, None), expected);
        }
        assert_eq!(error(name, Some("")), format!("{name}=: expected a value"));
    }
    assert_eq!(error("RANK", Some("first")), "RANK=first: expected an integer from 0 on");
    assert_eq!(error("RANK", Some("-1")), "RANK=-1: expected an integer from 0 on");
    assert_eq!(error("RANK", Some("4")), "RANK=4: WORLD_SIZE=4: expected 0 to 3");
    assert_eq!(error("LOCAL_RANK", Some("9")), "LOCAL_RANK=9: WORLD_SIZE=4: expected 0 to 3");
    // By hand, for a group of some of a machine's processes.
    let pair = Environment { rank: 1, world_size: 2, local_rank: 7, ..Environment::on_this_machine(1) };
    pair.check().unwrap();
    assert_eq!(error("WORLD_SIZE", Some("0")), "WORLD_SIZE=0: expected the number of processes, at least 1");
    assert_eq!(error("MASTER_PORT", Some("70000")), "MASTER_PORT=70000: expected a port from 1 to 65535");
    assert_eq!(error("MASTER_PORT", Some("0")), "MASTER_PORT=0: expected a port from 1 to 65535");
    assert_eq!(error("FP8_PORT", Some("http")), "FP8_PORT=http: expected a port from 1 to 65535");
}
