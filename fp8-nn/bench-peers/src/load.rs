//! The CPU time that other processes used during a measurement, from Linux's `/proc` where there is one.

use std::fs;

/// CPU times in clock ticks, counted from different starts: only differences mean something.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    /// The time of all cores, idle time included.
    all: f64,
    idle: f64,
    /// The time of this process and its workers.
    own: f64,
}

impl Load {
    /// Reads the times of now, for this process and workers with these ids.
    pub(crate) fn now(workers: impl Iterator<Item = u32>) -> Option<Self> {
        let stat = fs::read_to_string("/proc/stat").ok()?;
        let (all, idle) = totals(&stat)?;
        let times = workers.chain([std::process::id()]).map(|process| {
            fs::read_to_string(format!("/proc/{process}/stat")).ok().and_then(|stat| used(&stat))
        });
        Some(Self { all, idle, own: times.sum::<Option<f64>>()? })
    }

    /// Returns the time since `before` that other processes used, and all time since then.
    pub(crate) fn others_since(&self, before: &Self) -> [f64; 2] {
        let all = self.all - before.all;
        let others = all - (self.idle - before.idle) - (self.own - before.own);
        [others.max(0.0), all]
    }
}

/// All time and idle time, from the first line of `/proc/stat`.
fn totals(stat: &str) -> Option<(f64, f64)> {
    let times = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace().take(8);
    let times: Vec<f64> = times.map(|time| time.parse().ok()).collect::<Option<_>>()?;
    // user, nice, system, idle, iowait, irq, softirq, steal
    Some((times.iter().sum(), times.get(3)? + times.get(4)?))
}

/// User and system time of a process, from its `stat`: the 12th and 13th value after the parenthesized name.
fn used(stat: &str) -> Option<f64> {
    let mut values = stat.rsplit_once(") ")?.1.split(' ').skip(11);
    Some(values.next()?.parse::<f64>().ok()? + values.next()?.parse::<f64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_neither_idle_nor_ours_belongs_to_others() {
        let (all, idle) = totals("cpu  100 20 30 400 50 1 2 3 7 7\ncpu0 1\n").unwrap();
        assert_eq!((all, idle), (606.0, 450.0));
        assert_eq!(used("17 (a) b) S 1 17 17 0 -1 4 5 6 7 8 90 10 0 0"), Some(100.0));
        assert_eq!((totals("intr 1"), used("")), (None, None));
        let before = Load { all, idle, own: 10.0 };
        let now = Load { all: all + 200.0, idle: idle + 50.0, own: 110.0 };
        assert_eq!(now.others_since(&before), [50.0, 200.0]);
        assert_eq!(before.others_since(&before), [0.0, 0.0]);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_counts_as_own() {
        let before = Load::now(std::iter::empty()).unwrap();
        let start = std::time::Instant::now();
        // A busy machine may leave this process little time.
        while Load::now(std::iter::empty()).unwrap().own <= before.own {
            assert!(start.elapsed() < std::time::Duration::from_secs(60), "{before:?}");
        }
        assert!(Load::now([u32::MAX].into_iter()).is_none());
    }
}
