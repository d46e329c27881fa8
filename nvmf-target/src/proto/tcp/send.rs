//! The sending half: answers and data to the host.

use std::time::Instant;

use super::{Slot, TcpQueuePair};
use crate::buffer::IoBuf;
use crate::wire::CommandId;
use crate::wire::Cqe;
use crate::wire::digest::{DIGEST_BYTES, Digest};
use crate::wire::pdu::{
    C2HData, CapsuleResp, CommonHeader, FLAG_DATA_DIGEST, FLAG_HEADER_DIGEST, FLAG_LAST, FLAG_SUCCESS, PduType,
};

/// PDO is a byte, and HPDA at most 32 dwords.
const PADDING: [u8; 128] = [0; 128];

impl TcpQueuePair {
    /// Answers a command without data. CID and SQHD are filled in here.
    pub fn respond(&mut self, slot: Slot, cqe: Cqe, now: Instant) {
        let Some(outstanding) = self.slots.free(slot) else { return };
        if self.closing.is_none() {
            self.answer(Cqe { cid: outstanding.cid, ..cqe }, now);
        }
    }

    /// Sends `buffer` as the command's data and then the answer, which is left out when the SUCCESS flag may say it:
    /// only if the host has switched SQ flow control off (NVMe/TCP 1.1 §3.3.2.2).
    pub fn send_data(&mut self, slot: Slot, buffer: IoBuf, cqe: Cqe, now: Instant) {
        let Some(outstanding) = self.slots.free(slot) else { return };
        if self.closing.is_some() {
            return;
        }
        let plain_success = cqe.status.bits() == 0 && cqe.result() == 0;
        let flag_says_it = plain_success && !self.sq_flow_control && !buffer.is_empty();
        self.push_data(outstanding.cid, buffer, flag_says_it);
        if flag_says_it {
            self.output.mark();
            self.note_output(now);
        } else {
            self.answer(Cqe { cid: outstanding.cid, ..cqe }, now);
        }
    }

    fn push_data(&mut self, cccid: CommandId, buffer: IoBuf, success: bool) {
        let total = buffer.len();
        let most = (self.config.max_c2h_data_bytes as usize & !3).max(4);
        let key = self.output.hold(buffer);
        let mut start = 0;
        while start < total {
            let end = total.min(start + most);
            let last = end == total;
            let flags = if last { FLAG_LAST | if success { FLAG_SUCCESS } else { 0 } } else { 0 };
            self.push_c2h_header(cccid, flags, start, end - start);
            self.output.push_held(key, start, end);
            if self.rules.data_digest {
                let digest = Digest::of(&self.output.bytes(key)[start..end]);
                self.output.push(&digest.to_bytes());
            }
            start = end;
        }
        self.output.release(key);
    }

    fn push_c2h_header(&mut self, cccid: CommandId, flags: u8, start: usize, len_bytes: usize) {
        let header_bytes = C2HData::BYTES + if self.rules.header_digest { DIGEST_BYTES } else { 0 };
        let pdo = header_bytes.next_multiple_of(self.host_align_bytes);
        let digest_bytes = if self.rules.data_digest { DIGEST_BYTES } else { 0 };
        let mut common = CommonHeader::bare(PduType::C2HData);
        common.flags = flags | self.digest_flags();
        common.pdo = pdo as u8;
        common.plen = (pdo + len_bytes + digest_bytes) as u32;
        let header = C2HData { common, cccid, datao: start as u32, datal: len_bytes as u32 };
        self.push_header(&header.encode());
        self.output.push(&PADDING[..pdo - header_bytes]);
    }

    fn digest_flags(&self) -> u8 {
        let header = if self.rules.header_digest { FLAG_HEADER_DIGEST } else { 0 };
        header | if self.rules.data_digest { FLAG_DATA_DIGEST } else { 0 }
    }

    /// Queues a completion; the command it answers has no slot any more.
    pub(super) fn answer(&mut self, mut cqe: Cqe, now: Instant) {
        cqe.sqhd = if self.sq_flow_control { self.sqhd } else { u16::MAX };
        let mut common = CommonHeader::bare(PduType::CapsuleResp);
        if self.rules.header_digest {
            common.flags |= FLAG_HEADER_DIGEST;
            common.plen += DIGEST_BYTES as u32;
        }
        self.push_header(&CapsuleResp { common, cqe }.encode());
        self.output.mark();
        self.note_output(now);
    }

    /// A header, and its digest if that was agreed on.
    pub(super) fn push_header(&mut self, header: &[u8]) {
        self.output.push(header);
        if self.rules.header_digest {
            self.output.push(&Digest::of(header).to_bytes());
        }
    }

    /// The clock of a slow reader runs from when there is something to read.
    pub(super) fn note_output(&mut self, now: Instant) {
        if self.has_output() {
            let sent_bytes = self.output.sent_bytes();
            self.send_progress.get_or_insert((now, sent_bytes));
        }
    }
}
