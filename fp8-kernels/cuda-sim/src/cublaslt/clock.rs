//! The simulated time of products, which a test may script, and the order in which kernels ran.

use parking_lot::Mutex;

static CLOCK: Mutex<Option<Script>> = Mutex::new(None);

/// The number of kernels that are noted.
const NOTED: usize = 1 << 16;

/// The times that products take instead of the usual one.
#[derive(Debug)]
struct Script {
    /// Nanoseconds of each kernel.
    times: Vec<u64>,
    /// Nanoseconds that each product adds to all later ones, like a GPU that gets warm.
    heat: u64,
    ran: u64,
    /// The digit of each kernel that ran.
    noted: String,
}

/// Takes a script, `time,time,…;heat` in nanoseconds, or ends it with an empty text.
pub(crate) fn set(text: &str) -> Result<(), String> {
    let number = |text: &str| text.trim().parse::<u64>().map_err(|_| format!("{text}: expected nanoseconds"));
    let script = match text.split_once(';') {
        Some((times, heat)) => {
            let times = times.split(',').map(number).collect::<Result<_, _>>()?;
            Some(Script { times, heat: number(heat)?, ran: 0, noted: String::new() })
        }
        None if text.is_empty() => None,
        None => return Err("expected the times of the kernels and the heat, as in 5000,4000,9000;10".into()),
    };
    *CLOCK.lock() = script;
    Ok(())
}

/// Returns a digit for each product that ran since the script was set.
pub(crate) fn products() -> String {
    CLOCK.lock().as_ref().map(|script| script.noted.clone()).unwrap_or_default()
}

/// Returns the nanoseconds of a product by the kernel with this index.
pub(super) fn time(kernel: usize, usual: u64) -> u64 {
    let mut clock = CLOCK.lock();
    let Some(script) = clock.as_mut() else { return usual };
    let time = script.times.get(kernel).copied().unwrap_or(usual) + script.heat * script.ran;
    script.ran += 1;
    if script.noted.len() < NOTED {
        script.noted.push(char::from_digit(kernel as u32, 36).unwrap_or('?'));
    }
    time
}
