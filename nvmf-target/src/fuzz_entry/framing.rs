//! Bytes as a stream of PDUs, cut two ways: both must tell the same story.

use super::Input;
use crate::proto::framing::{Framer, HeaderFault, Receiver, Rules, Step};
use crate::wire::pdu::Pdu;

/// What a stream held, with neighbouring data joined.
#[derive(Debug, PartialEq, Eq)]
enum Story {
    Header(Pdu),
    Data(Vec<u8>),
    End(bool),
    Fault(HeaderFault),
}

/// Frames the bytes whole and in small pieces, for both ends and any agreed settings.
pub fn framing(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (choice, align, piece) = (input.byte(), input.byte(), input.byte());
    let rules = Rules {
        receiver: if choice & 1 == 0 { Receiver::Controller } else { Receiver::Host },
        connected: choice & 2 != 0,
        header_digest: choice & 4 != 0,
        data_digest: choice & 8 != 0,
        align_bytes: (u32::from(align % 32) + 1) * 4,
        capsule_data_max_bytes: 8192,
        data_max_bytes: 1 << 20,
    };
    let stream = input.rest();
    let whole = story(stream, usize::MAX, rules);
    let pieces = story(stream, usize::from(piece) + 1, rules);
    assert_eq!(whole, pieces, "how the stream is cut makes a difference");
}

fn story(mut stream: &[u8], piece: usize, rules: Rules) -> Vec<Story> {
    let mut framer = Framer::new(1024);
    let mut story = Vec::new();
    let mut declared = 0;
    loop {
        let room = framer.room();
        assert!(!room.is_empty(), "staging never fills up");
        let len = stream.len().min(piece).min(room.len());
        room[..len].copy_from_slice(&stream[..len]);
        framer.filled(len);
        stream = &stream[len..];
        loop {
            match framer.step(&rules) {
                Ok(Step::Starved) => break,
                Ok(Step::Header(pdu, layout)) => {
                    declared = layout.data_bytes as usize;
                    assert_eq!(Pdu::decode(&pdu.encode()).as_ref(), Ok(&pdu));
                    story.push(Story::Header(pdu));
                }
                Ok(Step::Data(data)) => {
                    assert!(!data.is_empty() && data.len() <= declared, "data beyond what was declared");
                    declared -= data.len();
                    match story.last_mut() {
                        Some(Story::Data(before)) => before.extend(data),
                        _ => story.push(Story::Data(data.to_vec())),
                    }
                }
                Ok(Step::End { intact }) => {
                    assert_eq!(declared, 0, "the end before the data's");
                    story.push(Story::End(intact));
                }
                Err(fault) => {
                    assert!(framer.header().len() <= 128);
                    story.push(Story::Fault(fault));
                    return story;
                }
            }
        }
        if stream.is_empty() {
            return story;
        }
    }
}
