//! The rendezvous's protocol, spoken by hand.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use crate::slow;
use fp8_dist::Environment;
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

pub(crate) const VERSION: u32 = 7;
pub(crate) const NONCE: [u8; 32] = [7; 32];

/// The first words of a rank.
pub(crate) fn words(rank: usize) -> Vec<u8> {
    [b"fp8-dist".as_slice(), &VERSION.to_le_bytes(), &(rank as u64).to_le_bytes(), &NONCE].concat()
}

fn text(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_le_bytes(), text].concat()
}

/// Returns the hello by which a rank introduces itself.
pub(crate) fn hello(id: &str, environment: &Environment) -> Vec<u8> {
    [
        text(id.as_bytes()),
        (environment.world_size as u64).to_le_bytes().to_vec(),
        (environment.rank as u64).to_le_bytes().to_vec(),
        environment.master_port.to_le_bytes().to_vec(),
        text(environment.run_id.as_bytes()),
        text(environment.run_id_variable.as_bytes()),
        vec![9; 16],
    ]
    .concat()
}

/// A hello behind its length, with the proof that its speaker knows `token`.
pub(crate) fn proven(hello: &[u8], token: &str, theirs: &[u8]) -> Vec<u8> {
    [text(hello), proof(b"fp8-dist guest\0", token, theirs, &[hello])].concat()
}

fn proof(role: &[u8], token: &str, theirs: &[u8], all: &[&[u8]]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(token.as_bytes()).unwrap();
    [role, &NONCE, theirs].iter().for_each(|part| mac.update(part));
    for part in all {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac.finalize().into_bytes().to_vec()
}

/// Connects, says the first words, and returns rank 0's nonce.
pub(crate) fn greet(environment: &Environment) -> (TcpStream, Vec<u8>) {
    let mut stream = slow::connect(environment.master_port);
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(&words(environment.rank)).unwrap();
    let mut answer = [0; 44];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..12], words(0)[..12]);
    (stream, answer[12..].to_vec())
}

/// Introduces itself as the rank that `environment` says, and checks rank 0's own hello.
pub(crate) fn join(id: &str, environment: &Environment) -> TcpStream {
    let (mut stream, nonce) = greet(environment);
    let own = hello(id, environment);
    stream.write_all(&proven(&own, &environment.token, &nonce)).unwrap();
    let mut verdict = [0; 5];
    stream.read_exact(&mut verdict).unwrap();
    assert_eq!(verdict[0], 1, "rank 0 believes it");
    let len = u32::from_le_bytes(verdict[1..].try_into().unwrap()) as usize;
    let mut rest = vec![0; len + 32];
    stream.read_exact(&mut rest).unwrap();
    let (theirs, tag) = rest.split_at(len);
    assert_eq!(tag, proof(b"fp8-dist host\0\0", &environment.token, &nonce, &[&own, theirs]));
    stream
}

/// Rank 0's side of one conversation, up to its own hello. `None`: the other side went.
pub(crate) fn host(mut stream: &TcpStream, id: &str, environment: &Environment) -> Option<()> {
    let mut words = [0; 52];
    stream.read_exact(&mut words).ok()?;
    stream.write_all(&[&words[..12], &NONCE].concat()).ok()?;
    let mut len = [0; 4];
    stream.read_exact(&mut len).ok()?;
    let mut theirs = vec![0; u32::from_le_bytes(len) as usize + 32];
    stream.read_exact(&mut theirs).ok()?;
    theirs.truncate(theirs.len() - 32);
    let own = hello(id, environment);
    let mut mac = Hmac::<Sha256>::new_from_slice(environment.token.as_bytes()).unwrap();
    [b"fp8-dist host\0\0", &words[20..], &NONCE].iter().for_each(|part| mac.update(part));
    for part in [&theirs, &own] {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    stream.write_all(&[&[1], &text(&own)[..], &mac.finalize().into_bytes()].concat()).ok()
}
