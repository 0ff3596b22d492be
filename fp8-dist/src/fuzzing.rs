//! Entry points of the fuzz targets in `fuzz/`, which cargo-fuzz compiles with `--cfg fuzzing`. Each panics if something is wrong.

use crate::division::Request;
use crate::wire;

/// Reads frames, as they come from a connection. What is a frame is written and read again as the same.
pub fn frames(mut bytes: &[u8]) {
    while let Ok(frame) = wire::receive(&mut bytes) {
        let write = |frame: &wire::Frame| {
            let mut out = Vec::new();
            wire::send(&mut out, frame).map(|()| out)
        };
        let written =
            write(&frame).unwrap_or_else(|error| panic!("a frame that was read is not written: {error}"));
        let again = wire::receive(&mut written.as_slice());
        let again = again.unwrap_or_else(|error| panic!("a frame that was written is not read: {error}"));
        assert_eq!(write(&again).ok(), Some(written), "a frame changes when it is read again");
    }
}

/// Reads the request of a rank in a division of a group.
pub fn request(bytes: &[u8]) {
    if let Some(request) = Request::from_bytes(bytes) {
        assert_eq!(
            Request::from_bytes(&request.to_bytes()),
            Some(request),
            "a request changes when it is read again"
        );
    }
}

pub use crate::rendezvous::fuzzing::{call, hello, visit};
