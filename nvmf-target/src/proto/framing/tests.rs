//! The header checks as a table, and the stream cut at every place.

use super::*;
use crate::wire::pdu::{C2HData, FLAG_DATA_DIGEST, FLAG_HEADER_DIGEST, FLAG_LAST, FLAG_SUCCESS, ICResp, PduType, R2T};
use crate::wire::{CommandId, Cqe, Status};

fn rules(receiver: Receiver) -> Rules {
    Rules {
        receiver,
        connected: true,
        header_digest: false,
        data_digest: false,
        align_bytes: 4,
        capsule_data_max_bytes: 8192,
        data_max_bytes: 1 << 20,
    }
}

fn header(pdu_type: PduType, flags: u8, pdo: u8, plen: u32) -> CommonHeader {
    CommonHeader { flags, pdo, plen, ..CommonHeader::bare(pdu_type) }
}

#[track_caller]
fn data_of(common: CommonHeader, rules: Rules) -> (u32, u32) {
    let layout = check_common(&common, &rules).unwrap_or_else(|fault| panic!("{fault}"));
    (layout.data_offset, layout.data_bytes)
}

#[test]
fn what_is_right_is_laid_out() {
    let target = rules(Receiver::Controller);
    let both = Rules { header_digest: true, data_digest: true, ..target };
    let flags = FLAG_HEADER_DIGEST | FLAG_DATA_DIGEST;
    let capsule = PduType::CapsuleCmd;
    assert_eq!(data_of(header(capsule, 0, 0, 72), target), (0, 0));
    assert_eq!(data_of(header(capsule, 0, 72, 72), target), (0, 0), "PDO without data");
    assert_eq!(data_of(header(capsule, 0, 72, 584), target), (72, 512));
    assert_eq!(data_of(header(capsule, FLAG_HEADER_DIGEST, 0, 76), both), (0, 0));
    assert_eq!(data_of(header(capsule, flags, 76, 76 + 512 + 4), both), (76, 512));
    assert_eq!(data_of(header(PduType::H2CData, flags, 28, 28 + 1 + 4), both), (28, 1));
    let aligned = Rules { align_bytes: 128, ..target };
    assert_eq!(data_of(header(capsule, 0, 128, 128 + 512), aligned), (128, 512));
    assert_eq!(data_of(header(PduType::H2CTermReq, 0, 0, 152), target), (24, 128));
    let host = rules(Receiver::Host);
    assert_eq!(data_of(header(PduType::C2HData, FLAG_LAST, 24, 24 + (1 << 20)), host), (24, 1 << 20));
}

/// The faults that a peer's bytes alone can't show through the queue's own tests.
#[test]
fn what_is_wrong_is_named() {
    let target = rules(Receiver::Controller);
    let data_digest = Rules { data_digest: true, ..target };
    let aligned = Rules { align_bytes: 128, ..target };
    let host = rules(Receiver::Host);
    let field = HeaderFault::field;
    let cases = [
        ("data without its digest", header(PduType::H2CData, 0, 24, 28), data_digest, field(1)),
        ("a digest and no data", header(PduType::H2CData, FLAG_DATA_DIGEST, 24, 28), data_digest, field(4)),
        ("an offset that isn't aligned", header(PduType::CapsuleCmd, 0, 76, 200), aligned, field(3)),
        ("an offset into the header", header(PduType::H2CData, 0, 20, 100), target, field(3)),
        ("data in the capsule at offset 0", header(PduType::CapsuleCmd, 0, 0, 100), target, field(3)),
        ("padding and no data", header(PduType::CapsuleCmd, 0, 76, 76), target, field(4)),
        ("in-capsule data over the limit", header(PduType::CapsuleCmd, 0, 72, 72 + 8193), target, field(4)),
        ("a long completion", header(PduType::CapsuleResp, 0, 0, 28), host, field(4)),
        ("a long R2T", header(PduType::R2T, 0, 0, 25), host, field(4)),
        ("a host's PDU to a host", header(PduType::H2CData, 0, 24, 28), host, field(0)),
    ];
    for (name, common, rules, fault) in cases {
        assert_eq!(check_common(&common, &rules), Err(fault), "{name}");
    }
    let over = header(PduType::H2CData, 0, 24, 24 + (1 << 20) + 1);
    assert_eq!(check_common(&over, &target), Err(HeaderFault::of(FatalError::LimitExceeded)));
}

#[test]
fn what_a_controller_may_not_say() {
    let common = CommonHeader::bare(PduType::ICResp);
    let right = ICResp { common, pfv: 0, cpda: 0, dgst: 0, maxh2cdata: 4096 };
    let rules = Rules { connected: false, header_digest: true, ..rules(Receiver::Host) };
    let layout = check_common(&common, &rules).unwrap();
    let check = |response: ICResp| check_pdu(&Pdu::ICResp(response), &layout, &rules);
    assert_eq!(check(right.clone()), Ok(()));
    assert_eq!(check(ICResp { dgst: 1, ..right.clone() }), Ok(()));
    assert_eq!(check(ICResp { dgst: 2, ..right.clone() }), Err(HeaderFault::field(11)), "not asked for");
    assert_eq!(check(ICResp { maxh2cdata: 4095, ..right.clone() }), Err(HeaderFault::field(12)));
    assert_eq!(check(ICResp { maxh2cdata: 4098, ..right.clone() }), Err(HeaderFault::field(12)));
    assert_eq!(check(ICResp { cpda: 32, ..right.clone() }), Err(HeaderFault::field(10)));
    let unsupported = HeaderFault { error: FatalError::UnsupportedParameter, info: 8 };
    assert_eq!(check(ICResp { pfv: 1, ..right }), Err(unsupported));
    // H10: SUCCESS without LAST.
    let common = header(PduType::C2HData, FLAG_SUCCESS, 24, 28);
    let data = C2HData { common, cccid: CommandId(0), datao: 0, datal: 4 };
    let layout = Layout { pdu_type: PduType::C2HData, data_offset: 24, data_bytes: 4, ..layout };
    assert_eq!(check_pdu(&Pdu::C2HData(data), &layout, &rules), Err(HeaderFault::field(1)));
    let common = CommonHeader::bare(PduType::R2T);
    let r2t = R2T { common, cccid: CommandId(0), ttag: 0, r2to: 0, r2tl: 0 };
    assert_eq!(check_pdu(&Pdu::R2T(r2t), &layout, &rules), Err(HeaderFault::field(16)));
}

/// H07: two PDUs cut at every byte give the same steps.
#[test]
fn h07_a_stream_cut_at_any_byte_gives_the_same_steps() {
    let data =
        C2HData { common: header(PduType::C2HData, FLAG_LAST, 32, 132), cccid: CommandId(3), datao: 0, datal: 100 };
    let response = crate::wire::pdu::CapsuleResp {
        common: CommonHeader::bare(PduType::CapsuleResp),
        cqe: Cqe::of(CommandId(3), Status::SUCCESS),
    };
    let mut stream = data.encode().to_vec();
    stream.extend([0; 8]);
    stream.extend([7; 100]);
    stream.extend(response.encode());
    for cut in 0..=stream.len() {
        let mut framer = Framer::new(1024);
        let (mut headers, mut bytes, mut ends) = (0, 0, 0);
        for part in [&stream[..cut], &stream[cut..]] {
            framer.room()[..part.len()].copy_from_slice(part);
            framer.filled(part.len());
            loop {
                match framer.step(&rules(Receiver::Host)).unwrap() {
                    Step::Starved => break,
                    Step::Header(..) => headers += 1,
                    Step::Data(data) => {
                        assert!(data.iter().all(|b| *b == 7));
                        bytes += data.len();
                    }
                    Step::End { intact } => ends += usize::from(intact),
                }
            }
        }
        assert_eq!((headers, bytes, ends), (2, 100, 1), "cut at {cut}");
    }
}
