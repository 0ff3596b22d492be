//! `FP8_DIST_TOKEN`: who does not know it neither joins nor learns anything.

use crate::rendezvous::{dp, join, works};
use crate::{LONG, SHORT, environments, speak};
use fp8_dist::{Environment, Failure, tcp};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

fn with_tokens<const N: usize>(tokens: [&str; N]) -> Vec<Environment> {
    let all = environments(N).into_iter().zip(tokens);
    all.map(|(environment, token)| Environment { token: token.to_owned(), ..environment }).collect()
}

#[test]
fn ranks_with_one_token_join() {
    works(join(dp(with_tokens(["hunter2"; 3])), LONG));
}

#[test]
fn another_token_is_an_error_on_both_that_does_not_show_it() {
    for tokens in [["hunter2", "hunter3"], ["hunter2", ""], ["", "hunter2"]] {
        for joined in join(dp(with_tokens(tokens)), SHORT) {
            let error = joined.map(|_| ()).unwrap_err();
            assert_eq!(error.failure(), Some(&Failure::Token { rank: 1 }), "{tokens:?}: {error}");
            assert_eq!(
                error.to_string(),
                "group `dp`: cannot form the group: FP8_DIST_TOKEN differs between rank 1 and rank 0: set the same token on all \
                 ranks of a job, or none"
            );
            assert!(!format!("{error:?}").contains("hunter"));
        }
    }
}

/// It hears a nonce, and that its proof is wrong; the job goes on without it.
#[test]
fn a_stranger_without_the_token_learns_nothing_and_cannot_join() {
    let environments = with_tokens(["hunter2"; 2]);
    let host = environments[0].clone();
    let host = thread::spawn(move || tcp("dp", &host, LONG));
    for token in ["", "hunter3"] {
        let (mut stream, nonce) = speak::greet(&environments[1]);
        let hello = speak::hello("dp", &environments[1]);
        stream.write_all(&speak::proven(&hello, token, &nonce)).unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, [0]);
    }
    // A proof that was heard on another connection.
    let (mut first, nonce) = speak::greet(&environments[1]);
    let replayed = speak::proven(&speak::hello("dp", &environments[1]), "hunter2", &nonce);
    let (mut second, other) = speak::greet(&environments[1]);
    assert_ne!(nonce, other);
    second.write_all(&replayed).unwrap();
    let mut rest = Vec::new();
    second.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, [0]);
    first.write_all(&[0; 4]).unwrap();
    let guest = tcp("dp", &environments[1], Duration::from_secs(5));
    works(vec![host.join().unwrap(), guest]);
}

/// It knows the port and all that a rank says in clear.
#[test]
fn a_rank_0_without_the_token_is_not_believed() {
    let environments = with_tokens(["hunter2"; 2]);
    let stranger = Environment { token: "guess".to_owned(), ..environments[0].clone() };
    let stranger = thread::spawn(move || tcp("dp", &stranger, Duration::from_secs(1)));
    let error = tcp("dp", &environments[1], Duration::from_secs(1)).map(|_| ()).unwrap_err();
    assert_eq!(error.failure(), Some(&Failure::Token { rank: 1 }));
    stranger.join().unwrap().map(|_| ()).unwrap_err();
}

/// It takes any proof for right, and makes one up.
#[test]
fn a_rank_0_that_cannot_prove_its_hello_is_not_believed() {
    let environments = with_tokens(["hunter2"; 2]);
    let listener = TcpListener::bind(("127.0.0.1", environments[0].master_port)).unwrap();
    let hello = speak::hello("dp", &environments[0]);
    thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let words = [&speak::words(0)[..12], &[5; 32]].concat();
            let _ = stream.write_all(&words);
            let _ = stream.read(&mut [0; 4096]);
            let len = (hello.len() as u32).to_le_bytes();
            let _ = stream.write_all(&[&[1], &len[..], &hello, &[0; 32]].concat());
            let _ = stream.read(&mut [0; 4096]);
        }
    });
    let error = tcp("dp", &environments[1], Duration::from_secs(1)).map(|_| ()).unwrap_err();
    assert_eq!(error.failure(), Some(&Failure::Token { rank: 1 }), "{error}");
}

#[test]
fn the_protocol_spoken_by_hand_joins() {
    let environments = with_tokens(["hunter2"; 2]);
    let host = environments[0].clone();
    let host = thread::spawn(move || tcp("dp", &host, LONG));
    let _guest = speak::join("dp", &environments[1]);
    host.join().unwrap().map(|_| ()).unwrap();
}
