//! Golden bytes of every PDU, and one property over all of them.

use proptest::prelude::*;

use super::*;
use crate::wire::{CommandId, Cqe, QueueId, SglDescriptor, Sqe, Status};

fn common(pdu_type: PduType, flags: u8, pdo: u8, plen: u32) -> CommonHeader {
    CommonHeader { flags, pdo, plen, ..CommonHeader::bare(pdu_type) }
}

#[track_caller]
fn golden(pdu: Pdu, hex: &str) {
    let bytes = pdu.encode();
    let printed: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    let want: String = hex.split_whitespace().collect();
    assert_eq!(printed.trim_end_matches('0'), want.trim_end_matches('0'), "{pdu:?}");
    assert_eq!(Pdu::decode(&bytes), Ok(pdu));
}

#[test]
fn golden_bytes() {
    golden(
        Pdu::ICReq(ICReq { common: CommonHeader::bare(PduType::ICReq), pfv: 0, hpda: 7, dgst: 3, maxr2t: 15 }),
        "00 00 80 00 80000000 0000 07 03 0f000000",
    );
    golden(
        Pdu::ICResp(ICResp {
            common: CommonHeader::bare(PduType::ICResp),
            pfv: 0,
            cpda: 1,
            dgst: 2,
            maxh2cdata: 0x0002_0000,
        }),
        "01 00 80 00 80000000 0000 01 02 00000200",
    );
    golden(
        Pdu::TermReq(TermReq { common: common(PduType::C2HTermReq, 0, 0, 32), fes: 1, fei: 0x0a0b_0c0d }),
        "03 00 18 00 20000000 0100 0d0c0b0a",
    );
    golden(
        Pdu::TermReq(TermReq { common: common(PduType::H2CTermReq, 0, 0, 152), fes: 3, fei: 1 }),
        "02 00 18 00 98000000 0300 01000000",
    );
    let mut sqe = Sqe::new(0x01);
    sqe.set_command_id(CommandId(0x1234)).set_dword(1, 9).set_sgl(SglDescriptor::in_capsule(0, 512));
    sqe.set_cdw10_11(0x0102_0304_0506_0708).set_dword(12, 0x4000_0000);
    golden(
        Pdu::CapsuleCmd(CapsuleCmd { common: common(PduType::CapsuleCmd, 3, 76, 592), sqe }),
        "04 03 48 4c 50020000 01403412 09000000 0000000000000000 0000000000000000
         0000000000000000 00020000 00000001 0807060504030201 00000040",
    );
    let status = Status::LBA_OUT_OF_RANGE.dnr();
    let cqe = Cqe { dw0: 1, dw1: 2, sqhd: 3, sqid: QueueId(4), cid: CommandId(5), status };
    golden(
        Pdu::CapsuleResp(CapsuleResp { common: CommonHeader::bare(PduType::CapsuleResp), cqe }),
        "05 00 18 00 18000000 01000000 02000000 0300 0400 0500 0081",
    );
    golden(
        Pdu::H2CData(H2CData {
            common: common(PduType::H2CData, FLAG_LAST, 24, 4120),
            cccid: CommandId(7),
            ttag: 8,
            datao: 4096,
            datal: 4096,
        }),
        "06 04 18 18 18100000 0700 0800 00100000 00100000",
    );
    golden(
        Pdu::C2HData(C2HData {
            common: common(PduType::C2HData, FLAG_LAST | FLAG_SUCCESS, 24, 536),
            cccid: CommandId(7),
            datao: 0,
            datal: 512,
        }),
        "07 0c 18 18 18020000 0700 0000 00000000 00020000",
    );
    golden(
        Pdu::R2T(R2T {
            common: CommonHeader::bare(PduType::R2T),
            cccid: CommandId(7),
            ttag: 8,
            r2to: 0,
            r2tl: 0x0010_0000,
        }),
        "09 00 18 00 18000000 0700 0800 00000000 00001000",
    );
}

proptest! {
    /// Whatever decodes, encodes to bytes that decode to the same; every truncation is an error; nothing panics.
    #[test]
    fn every_pdu_round_trips_and_every_truncation_errors(
        mut bytes in proptest::collection::vec(any::<u8>(), HEADER_MAX_BYTES),
        which in 0..PduType::ALL.len(),
    ) {
        let pdu_type = PduType::ALL[which];
        bytes[0] = pdu_type as u8;
        let pdu = Pdu::decode(&bytes).unwrap();
        let encoded = pdu.encode();
        prop_assert_eq!(encoded.len(), pdu_type.header_bytes());
        prop_assert_eq!(Pdu::decode(&encoded).unwrap(), pdu);
        for len in 0..encoded.len() {
            prop_assert!(Pdu::decode(&encoded[..len]).is_err());
        }
    }

    #[test]
    fn any_bytes_decode_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Pdu::decode(&bytes).map(|pdu| pdu.encode());
        let _ = Sqe::decode(&bytes).map(|sqe| (sqe.sgl().kind(), sqe.fuse(), sqe.psdt(), format!("{sqe:?}")));
        let _ = Cqe::decode(&bytes).map(|cqe| cqe.encode());
    }
}
