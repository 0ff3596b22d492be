//! A device that an error has killed.

use crate::fault::{Fault, expect_typed};
use crate::recording::{Done, record};
use crate::rig::Rig;
use crate::training::{Stage, Training, expect_useless};
use fp8_nn::prelude::checkpoint;

#[test]
fn a_device_that_died_says_so_to_all() {
    let rig = Rig::new();
    // An illegal address, a launch failure; a product that met an error of the device.
    let faults = [
        ("cuLaunchKernel", 40, 700),
        ("cuMemsetD8Async", 1, 719),
        ("cuMemcpyHtoDAsync_v2", 1, 700),
        ("cuStreamSynchronize", 1, 719),
        ("cublasLtMatmul", 7, 13),
        ("cuGraphLaunch", 1, 700),
        ("cuStreamEndCapture", 1, 719),
    ];
    for (function, count, code) in faults {
        let fault = Fault { function: function.to_owned(), count, code };
        let mut training = Training::warm(rig.open());
        training.save(rig.path()).unwrap();
        let old = std::fs::read(checkpoint::path(rig.path())).unwrap();
        let steps = training.optimizer.steps();
        rig.fail(&fault);
        let records = function.contains("Graph") || function.contains("Capture");
        let result = match records {
            true => record(&mut training, &mut Done::Nothing).map(drop),
            false => training.step().map(drop),
        };
        expect_typed(&result.unwrap_err(), &fault);
        // What fails behind the optimizer's step does not take it back.
        let counted = u64::from(training.stage > Stage::Optimize && !records);
        assert_eq!(training.optimizer.steps(), steps + counted, "{fault}");
        assert!(training.is_poisoned(), "{fault}");
        expect_useless(&mut training, rig.path(), &old);
        drop(training);
        assert_eq!(rig.left(), [""; 0], "{fault}");
    }
}
