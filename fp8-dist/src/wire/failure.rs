//! The encoding of failures.

use super::head::{Head, invalid, put_number, put_ranks, put_text};
use crate::Failure;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The properties that [`Failure::Disagree`] can contain.
const PROPERTIES: [&str; 4] = ["the call", "the dtype", "the shape", "the shape, dimension 0 aside,"];

pub(super) fn put_failure(head: &mut Vec<u8>, failure: &Failure) {
    let pair = |head: &mut Vec<u8>, [rank, other]: [usize; 2], [value, other_value]: [&str; 2]| {
        put_number(head, rank as u64);
        put_text(head, value);
        put_number(head, other as u64);
        put_text(head, other_value);
    };
    match failure {
        Failure::GaveUp { rank, reason } => {
            head.push(0);
            put_number(head, *rank as u64);
            put_text(head, reason);
        }
        Failure::Left { ranks: left } => {
            head.push(1);
            put_ranks(head, left);
        }
        Failure::Deadline { missing, waited } => {
            head.push(2);
            put_ranks(head, missing);
            put_number(head, waited.as_secs());
            put_number(head, waited.subsec_nanos().into());
        }
        Failure::Lost { rank, reason } => {
            head.push(3);
            put_number(head, *rank as u64);
            put_text(head, reason);
        }
        Failure::Settings { property, rank, value, other, other_value } => {
            head.push(4);
            put_text(head, property);
            pair(head, [*rank, *other], [value, other_value]);
        }
        Failure::Twice { rank } => {
            head.push(5);
            put_number(head, *rank as u64);
        }
        Failure::Disagree { property, rank, value, other, other_value } => {
            head.push(6);
            head.push(PROPERTIES.iter().position(|known| known == property).unwrap_or_default() as u8);
            pair(head, [*rank, *other], [value, other_value]);
        }
        Failure::Lone { comparing, call, other, other_call } => {
            head.push(10);
            pair(head, [*comparing, *other], [call, other_call]);
        }
        Failure::Names { index, rank, value, other, other_value } => {
            head.push(7);
            put_number(head, *index as u64);
            head.push(u8::from(value.is_some()) | u8::from(other_value.is_some()) << 1);
            let text = |name: &Option<Arc<str>>| name.clone().unwrap_or_default();
            pair(head, [*rank, *other], [&text(value), &text(other_value)]);
        }
        Failure::Token { rank } => {
            head.push(9);
            put_number(head, *rank as u64);
        }
        Failure::SecondJob { port } => {
            head.push(8);
            put_number(head, u64::from(*port));
        }
    }
}

impl Head<'_> {
    pub(super) fn failure(&mut self) -> io::Result<Failure> {
        Ok(match self.byte()? {
            0 => Failure::GaveUp { rank: self.count()?, reason: self.text()? },
            1 => Failure::Left { ranks: self.ranks()? },
            2 => {
                let missing = self.ranks()?;
                let (secs, nanos) = (self.number()?, self.number()?);
                let nanos = u32::try_from(nanos).ok().filter(|&nanos| nanos < 1_000_000_000);
                let nanos = nanos.ok_or_else(|| invalid("a duration".to_owned()))?;
                Failure::Deadline { missing, waited: Duration::new(secs, nanos) }
            }
            3 => Failure::Lost { rank: self.count()?, reason: self.text()? },
            4 => {
                let property = self.text()?;
                let (rank, value) = (self.count()?, self.text()?);
                let (other, other_value) = (self.count()?, self.text()?);
                Failure::Settings { property, rank, value, other, other_value }
            }
            5 => Failure::Twice { rank: self.count()? },
            6 => {
                let tag = self.byte()?;
                let property =
                    PROPERTIES.get(usize::from(tag)).ok_or_else(|| invalid(format!("property {tag}")))?;
                let (rank, value) = (self.count()?, self.text()?);
                let (other, other_value) = (self.count()?, self.text()?);
                Failure::Disagree { property, rank, value, other, other_value }
            }
            7 => {
                let (index, has) = (self.count()?, self.byte()?);
                let name = |text: String, bit: u8| (has & bit != 0).then(|| text.into());
                let (rank, value) = (self.count()?, name(self.text()?, 1));
                let (other, other_value) = (self.count()?, name(self.text()?, 2));
                Failure::Names { index, rank, value, other, other_value }
            }
            8 => {
                let port = u16::try_from(self.number()?).map_err(|_| invalid("a port".to_owned()))?;
                Failure::SecondJob { port }
            }
            9 => Failure::Token { rank: self.count()? },
            10 => {
                let (comparing, call) = (self.count()?, self.text()?);
                let (other, other_call) = (self.count()?, self.text()?);
                Failure::Lone { comparing, call, other, other_call }
            }
            tag => return Err(invalid(format!("failure {tag}"))),
        })
    }
}
