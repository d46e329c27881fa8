//! The host's sending half: command capsules and the data that R2Ts ask for.

use super::{HostData, HostQueuePair, Transfer};
use crate::proto::tcp::HeldKey;
use crate::wire::digest::{DIGEST_BYTES, Digest};
use crate::wire::pdu::{
    CapsuleCmd, CommonHeader, FLAG_DATA_DIGEST, FLAG_HEADER_DIGEST, FLAG_LAST, H2CData, PduType, R2T,
};
use crate::wire::{CommandId, SglDescriptor, Sqe};

/// PDO is a byte, and CPDA at most 32 dwords.
const PADDING: [u8; 128] = [0; 128];
/// PSDT: SGLs, metadata contiguous.
const PSDT_SGL: u8 = 1;

impl HostQueuePair {
    pub(super) fn send_capsule(&mut self, mut sqe: Sqe, cid: CommandId, data: HostData) -> Transfer {
        sqe.set_command_id(cid).set_psdt_bits(PSDT_SGL);
        let limit = self.config.in_capsule_bytes as usize;
        match data {
            HostData::None => {
                self.push_capsule(sqe.set_sgl(SglDescriptor::transport(0)), None);
                Transfer::None
            }
            HostData::FromController(buffer) => {
                self.push_capsule(sqe.set_sgl(SglDescriptor::transport(buffer.len() as u32)), None);
                Transfer::Receiving { buffer, come_bytes: 0, intact: true, last_seen: false }
            }
            HostData::ToController(buffer) if !buffer.is_empty() && buffer.len() <= limit => {
                let len_bytes = buffer.len() as u32;
                let key = self.output.hold(buffer);
                let in_capsule = Some((key, len_bytes as usize));
                self.push_capsule(sqe.set_sgl(SglDescriptor::in_capsule(0, len_bytes)), in_capsule);
                Transfer::Sending { key, len_bytes, asked_bytes: len_bytes }
            }
            HostData::ToController(buffer) => {
                let len_bytes = buffer.len() as u32;
                self.push_capsule(sqe.set_sgl(SglDescriptor::transport(len_bytes)), None);
                Transfer::Sending { key: self.output.hold(buffer), len_bytes, asked_bytes: 0 }
            }
        }
    }

    fn push_capsule(&mut self, sqe: &Sqe, data: Option<(HeldKey, usize)>) {
        let len_bytes = data.map(|(_, len_bytes)| len_bytes);
        let (common, padding) = self.header_of(PduType::CapsuleCmd, 0, len_bytes);
        self.push_header(&CapsuleCmd { common, sqe: *sqe }.encode());
        if let Some((key, len_bytes)) = data {
            self.push_data(key, 0, len_bytes, padding);
        }
    }

    /// Answers an R2T, in as many H2CData as MAXH2CDATA makes of it.
    pub(super) fn send_data(&mut self, key: HeldKey, r2t: &R2T) {
        let (mut start, end) = (r2t.r2to as usize, r2t.r2to as usize + r2t.r2tl as usize);
        while start < end {
            let len_bytes = self.h2c_data_max_bytes.min(end - start);
            let flags = if start + len_bytes == end { FLAG_LAST } else { 0 };
            let (common, padding) = self.header_of(PduType::H2CData, flags, Some(len_bytes));
            let (datao, datal) = (start as u32, len_bytes as u32);
            self.push_header(&H2CData { common, cccid: r2t.cccid, ttag: r2t.ttag, datao, datal }.encode());
            self.push_data(key, start, start + len_bytes, padding);
            start += len_bytes;
        }
    }

    /// A common header, and the padding between header and data.
    fn header_of(&self, pdu_type: PduType, flags: u8, data_bytes: Option<usize>) -> (CommonHeader, usize) {
        let mut common = CommonHeader::bare(pdu_type);
        common.flags = flags;
        let mut header_bytes = pdu_type.header_bytes();
        if self.rules.header_digest {
            common.flags |= FLAG_HEADER_DIGEST;
            header_bytes += DIGEST_BYTES;
        }
        common.plen = header_bytes as u32;
        let Some(data_bytes) = data_bytes else { return (common, 0) };
        let pdo = header_bytes.next_multiple_of(self.controller_align_bytes);
        common.pdo = pdo as u8;
        common.plen = (pdo + data_bytes) as u32;
        if self.rules.data_digest {
            common.flags |= FLAG_DATA_DIGEST;
            common.plen += DIGEST_BYTES as u32;
        }
        (common, pdo - header_bytes)
    }

    fn push_header(&mut self, header: &[u8]) {
        self.output.push(header);
        if self.rules.header_digest {
            self.output.push(&Digest::of(header).to_bytes());
        }
    }

    fn push_data(&mut self, key: HeldKey, start: usize, end: usize, padding: usize) {
        self.output.push(&PADDING[..padding]);
        self.output.push_held(key, start, end);
        if self.rules.data_digest {
            let digest = Digest::of(&self.output.bytes(key)[start..end]);
            self.output.push(&digest.to_bytes());
        }
    }
}
