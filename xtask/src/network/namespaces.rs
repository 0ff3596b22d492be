//! Two network namespaces with a link between them, whose rate can be limited and which can be cut.

use std::process::{Command, Stdio, id};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::workspace::Result;

/// The namespaces, which are removed when this is dropped.
pub(crate) struct Namespaces {
    names: [String; 2],
}

/// The addresses of the two ends: a range that is set aside for tests of networks.
pub(crate) const ADDRESSES: [&str; 2] = ["198.18.77.1", "198.18.77.2"];
const LINK: &str = "fp8";
/// A hardware address that no end of the link has.
const NOBODY: &str = "02:00:00:00:77:00";

impl Namespaces {
    /// Creates the namespaces. The error says why this machine has none.
    pub(crate) fn new() -> Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let names = [0, 1].map(|end| format!("fp8-{}-{count}-{end}", id()));
        let all = Self { names }; // what there is of it is removed, also after an error
        for name in &all.names {
            run("ip", &format!("netns add {name}"))?;
        }
        let [first, second] = &all.names;
        run("ip", &format!("link add {LINK} netns {first} type veth peer name {LINK} netns {second}"))?;
        for (name, address) in all.names.iter().zip(ADDRESSES) {
            run("ip", &format!("-n {name} addr add {address}/30 dev {LINK}"))?;
            run("ip", &format!("-n {name} link set {LINK} up"))?;
            run("ip", &format!("-n {name} link set lo up"))?;
        }
        all.limit(1e12)?;
        Ok(all)
    }

    /// Limits the rate of the link in both directions, in bytes a second.
    pub(crate) fn limit(&self, rate: f64) -> Result {
        let bits = (rate * 8.0).min(4e10) as u64;
        for name in &self.names {
            let shape = format!("root tbf rate {bits}bit burst 256kb latency 100ms");
            run("tc", &format!("-n {name} qdisc replace dev {LINK} {shape}"))?;
        }
        Ok(())
    }

    /// Cuts the link: what is sent goes to an address that no machine has, and nobody is told.
    pub(crate) fn cut(&self) -> Result {
        let [first, second] = ADDRESSES;
        for (name, other) in self.names.iter().zip([second, first]) {
            run("ip", &format!("-n {name} neigh replace {other} lladdr {NOBODY} dev {LINK} nud permanent"))?;
        }
        Ok(())
    }

    /// A command that runs `program` at one end.
    pub(crate) fn command(&self, end: usize, program: &std::path::Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[end]]).arg(program);
        command
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = run("ip", &format!("netns del {name}"));
        }
    }
}

fn run(program: &str, arguments: &str) -> Result {
    let command = format!("{program} {arguments}");
    let output = Command::new(program).args(arguments.split(' ')).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{command}: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{command}: {}", String::from_utf8_lossy(&output.stderr).trim()).into()),
    }
}
