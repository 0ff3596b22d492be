//! Loads PTX files and lists their kernels: `cargo run -p ptx-interp --example load -- FILE.ptx …`.

use std::error::Error;
use std::io::Write;

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = std::io::stdout();
    for path in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&path)?;
        let start = std::time::Instant::now();
        let module = ptx_interp::Module::parse(&text).map_err(|error| format!("{path}: {error}"))?;
        let time = start.elapsed();
        writeln!(out, "{path}: {} in {time:.2?}", module.target())?;
        for kernel in module.kernels() {
            let (params, shared) = (kernel.params_size(), kernel.static_shared());
            writeln!(
                out,
                "  {}: {} instructions, {params} bytes of parameters, {shared} of shared memory",
                kernel.name(),
                kernel.instructions()
            )?;
        }
    }
    Ok(())
}
