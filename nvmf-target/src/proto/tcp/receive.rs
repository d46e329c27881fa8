//! The receiving half: from PDUs to events.

use std::time::Instant;

use super::slots::Slots;
use super::transfer::{Ask, OFFSET_TTAG, Transfer, split_ttag};
use super::{CapsuleData, CloseReason, SEND_PROGRESS_BYTES, Slot, TERM_REQ_TIMEOUT, TcpEvent, TcpQueuePair};
use crate::buffer::IoBuf;
use crate::proto::framing::{HeaderFault, Layout, Step};
use crate::wire::digest::DIGEST_BYTES;
use crate::wire::pdu::{
    CommonHeader, FLAG_HEADER_DIGEST, FatalError, H2CData, ICReq, ICResp, Pdu, PduType, R2T, TERM_REQ_DATA_MAX_BYTES,
    TermReq,
};
use crate::wire::{CommandId, Cqe, Fuse, Sqe, Status};

/// Where the data of the PDU that is being received goes, and what its end means.
#[derive(Debug)]
pub(super) enum Incoming {
    /// No data is being received.
    Nothing,
    /// To nowhere; then this command is answered 00/03h.
    Conflict(CommandId),
    /// In-capsule data, into a buffer of the pool.
    Placed { slot: Slot, sqe: Sqe, buffer: IoBuf, at: usize },
    /// In-capsule data, into the slot's part of the reserve.
    Reserved { slot: Slot, sqe: Sqe, at: usize, len_bytes: u32 },
    /// H2CData, into the buffer of the slot's transfer.
    Transfer { slot: Slot, r2t: usize, at: u32, len_bytes: u32 },
}

/// A command capsule whose header has come, but which may not be taken yet: too many answers wait to be sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeldCapsule {
    sqe: Sqe,
    layout: Layout,
}

impl Incoming {
    /// The place of the next data bytes; empty if they go nowhere.
    pub(super) fn place<'a>(&'a mut self, slots: &'a mut Slots, reserve: &'a mut [u8]) -> &'a mut [u8] {
        let place = match self {
            Self::Nothing | Self::Conflict(_) => None,
            Self::Placed { buffer, at, .. } => buffer.get_mut(*at..),
            Self::Reserved { at, .. } => reserve.get_mut(*at..),
            Self::Transfer { slot, at, .. } => {
                slots.get_mut(*slot).and_then(|o| o.transfer.as_mut()).map(|transfer| transfer.place(*at))
            }
        };
        place.unwrap_or_default()
    }

    /// `len_bytes` came.
    pub(super) fn advance(&mut self, len_bytes: usize) {
        match self {
            Self::Nothing | Self::Conflict(_) => {}
            Self::Placed { at, .. } | Self::Reserved { at, .. } => *at += len_bytes,
            Self::Transfer { at, .. } => *at += len_bytes as u32,
        }
    }
}

impl TcpQueuePair {
    /// Takes in what is staged.
    pub(super) fn advance(&mut self, now: Instant) {
        if let Some(held) = self.held_capsule.take() {
            self.capsule(held.sqe, held.layout, now);
        }
        while self.closing.is_none() && self.held_capsule.is_none() {
            let step = self.framer.step(&self.rules);
            let done = match step {
                Ok(Step::Starved) => break,
                Ok(Step::Header(pdu, layout)) => self.header(pdu, layout, now),
                Ok(Step::Data(bytes)) => {
                    let place = self.incoming.place(&mut self.slots, &mut self.reserve);
                    // A place that is shorter discards: only data that goes nowhere has one.
                    let len = bytes.len().min(place.len());
                    place[..len].copy_from_slice(&bytes[..len]);
                    self.incoming.advance(bytes.len());
                    Ok(())
                }
                Ok(Step::End { intact }) => {
                    self.end(intact, now);
                    Ok(())
                }
                Err(fault) => Err(fault),
            };
            if let Err(fault) = done {
                self.protocol_error(fault, now);
            }
        }
        self.note_transfer_progress(now);
    }

    /// Any bytes count as progress while data is awaited; a peer that trickles meets the other deadline.
    fn note_transfer_progress(&mut self, now: Instant) {
        let receiving = matches!(self.incoming, Incoming::Placed { .. });
        let awaited = self.transfers > 0 || receiving;
        self.transfer_progress = awaited.then_some(now);
        self.transfer_pace = match self.transfer_pace {
            _ if !awaited => None,
            Some((since, before)) if self.received_bytes - before < SEND_PROGRESS_BYTES => Some((since, before)),
            _ => Some((now, self.received_bytes)),
        };
    }

    fn header(&mut self, pdu: Pdu, layout: Layout, now: Instant) -> Result<(), HeaderFault> {
        match pdu {
            Pdu::ICReq(request) => self.ic_req(&request, now),
            // What follows it is for people who read traces.
            Pdu::TermReq(request) => {
                self.close(CloseReason::PeerTerminated { fes: request.fes, fei: request.fei });
            }
            Pdu::CapsuleCmd(capsule) => self.capsule(capsule.sqe, layout, now),
            Pdu::H2CData(data) => self.h2c_data(&data)?,
            // `check_common` lets a controller receive none of these.
            Pdu::ICResp(_) | Pdu::CapsuleResp(_) | Pdu::C2HData(_) | Pdu::R2T(_) => {
                return Err(HeaderFault::field(0));
            }
        }
        Ok(())
    }

    fn ic_req(&mut self, request: &ICReq, now: Instant) {
        self.rules.connected = true;
        self.rules.header_digest = request.dgst & 1 != 0 && self.config.allow_header_digest;
        self.rules.data_digest = request.dgst & 2 != 0 && self.config.allow_data_digest;
        self.host_align_bytes = (usize::from(request.hpda) + 1) * 4;
        self.max_r2ts = usize::try_from(request.maxr2t).unwrap_or(usize::MAX).saturating_add(1);
        let response = ICResp {
            common: CommonHeader::bare(PduType::ICResp),
            pfv: 0,
            cpda: self.config.cpda,
            dgst: u8::from(self.rules.header_digest) | u8::from(self.rules.data_digest) << 1,
            maxh2cdata: self.config.max_h2c_data_bytes,
        };
        self.output.push(&response.encode());
        self.note_output(now);
    }

    /// A command capsule's header has come.
    fn capsule(&mut self, sqe: Sqe, layout: Layout, now: Instant) {
        let unsent = self.output.unsent_marks();
        if unsent > 0 && self.slots.taken() + unsent >= usize::from(self.entries) {
            // Honest hosts get here for a moment only, while an answer is half sent. For others the socket's own
            // flow control takes over until they read.
            self.held_capsule = Some(HeldCapsule { sqe, layout });
            return;
        }
        if self.slots.is_full() {
            // H21. No status code or FES is made for it; the sequence of capsules is what is wrong.
            return self.protocol_error(HeaderFault::of(FatalError::SequenceError), now);
        }
        self.sqhd = (self.sqhd + 1) % self.entries;
        let cid = sqe.command_id();
        if self.slots.is_live(cid) {
            if layout.data_bytes > 0 {
                self.incoming = Incoming::Conflict(cid);
            } else {
                self.answer(Cqe::of(cid, Status::COMMAND_ID_CONFLICT.dnr()), now);
            }
            return;
        }
        let Some(slot) = self.slots.take(cid) else { return };
        if layout.data_bytes == 0 {
            self.events.push_back(TcpEvent::Command { slot, sqe, data: CapsuleData::None });
        } else {
            self.incoming = self.place_for_capsule(slot, sqe, layout.data_bytes);
        }
    }

    /// Both buffers of a fused pair are taken at once, later: a half that held one while it waits could starve others.
    fn place_for_capsule(&self, slot: Slot, sqe: Sqe, len_bytes: u32) -> Incoming {
        let from_pool = !self.reserve_first && sqe.fuse() == Fuse::Normal;
        match from_pool.then(|| self.pool.take(len_bytes as usize)).flatten() {
            Some(buffer) => Incoming::Placed { slot, sqe, buffer, at: 0 },
            None => {
                let start = usize::from(slot.0) * self.rules.capsule_data_max_bytes as usize;
                Incoming::Reserved { slot, sqe, at: start, len_bytes }
            }
        }
    }

    fn h2c_data(&mut self, data: &H2CData) -> Result<(), HeaderFault> {
        let (slot, r2t) = split_ttag(data.ttag);
        let outstanding = self.slots.get(slot).ok_or(HeaderFault::field(OFFSET_TTAG))?;
        let transfer = outstanding.transfer.as_ref().ok_or(HeaderFault::field(OFFSET_TTAG))?;
        transfer.check(r2t, outstanding.cid, data)?;
        self.incoming = Incoming::Transfer { slot, r2t, at: data.datao, len_bytes: data.datal };
        Ok(())
    }

    /// The data of a PDU has come whole.
    fn end(&mut self, intact: bool, now: Instant) {
        match std::mem::replace(&mut self.incoming, Incoming::Nothing) {
            Incoming::Nothing => {}
            Incoming::Conflict(cid) => self.answer(Cqe::of(cid, Status::COMMAND_ID_CONFLICT.dnr()), now),
            Incoming::Placed { slot, sqe, buffer, .. } => {
                let data = CapsuleData::Placed { buffer, intact };
                self.events.push_back(TcpEvent::Command { slot, sqe, data });
            }
            Incoming::Reserved { slot, sqe, len_bytes, .. } => {
                let data = CapsuleData::Reserved { len_bytes, intact };
                self.events.push_back(TcpEvent::Command { slot, sqe, data });
            }
            Incoming::Transfer { slot, r2t, len_bytes, .. } => self.transfer_came(slot, r2t, len_bytes, intact, now),
        }
    }

    fn transfer_came(&mut self, slot: Slot, r2t: usize, len_bytes: u32, intact: bool, now: Instant) {
        let Some(outstanding) = self.slots.get_mut(slot) else { return };
        let Some(transfer) = outstanding.transfer.as_mut() else { return };
        transfer.came(r2t, len_bytes, intact);
        if !transfer.is_whole() {
            return self.ask(slot, now);
        }
        if let Some(transfer) = outstanding.transfer.take() {
            self.transfers -= 1;
            let (buffer, intact) = transfer.into_parts();
            self.events.push_back(TcpEvent::Fetched { slot, buffer, intact });
        }
    }

    /// Solicits `buffer.len()` bytes of the command's data from the host: [`TcpEvent::Fetched`] follows. The buffer
    /// must not be empty.
    pub fn fetch(&mut self, slot: Slot, buffer: IoBuf, now: Instant) {
        debug_assert!(!buffer.is_empty(), "an R2T for nothing is never answered");
        if self.closing.is_some() {
            return;
        }
        let Some(outstanding) = self.slots.get_mut(slot) else { return };
        debug_assert!(outstanding.transfer.is_none(), "one transfer a command");
        outstanding.transfer = Some(Transfer::new(buffer, now));
        self.transfers += 1;
        self.transfer_progress.get_or_insert(now);
        self.transfer_pace.get_or_insert((now, self.received_bytes));
        let limit = now + self.trickle_limit();
        self.trickle_check.get_or_insert(limit);
        self.ask(slot, now);
    }

    /// Sends as many R2Ts for the slot's transfer as are allowed.
    fn ask(&mut self, slot: Slot, now: Instant) {
        while let Some((cccid, ask)) = self.next_ask(slot) {
            let mut common = CommonHeader::bare(PduType::R2T);
            if self.rules.header_digest {
                common.flags |= FLAG_HEADER_DIGEST;
                common.plen += DIGEST_BYTES as u32;
            }
            let r2t = R2T { common, cccid, ttag: ask.ttag, r2to: ask.offset, r2tl: ask.len_bytes };
            self.push_header(&r2t.encode());
        }
        self.note_output(now);
    }

    fn next_ask(&mut self, slot: Slot) -> Option<(CommandId, Ask)> {
        let outstanding = self.slots.get_mut(slot)?;
        // Whole dwords: only a command's last data may end on another boundary (NVMe/TCP 1.1 §3.6.2.8).
        let most = (self.config.max_r2t_bytes & !3).max(4);
        let ask = outstanding.transfer.as_mut()?.ask(slot, self.max_r2ts, most)?;
        Some((outstanding.cid, ask))
    }

    /// Copies a command's reserved in-capsule data to the start of `buffer`.
    pub fn copy_reserved(&self, slot: Slot, buffer: &mut [u8]) {
        let start = usize::from(slot.0) * self.rules.capsule_data_max_bytes as usize;
        if let Some(kept) = self.reserve.get(start..start + buffer.len()) {
            buffer.copy_from_slice(kept);
        }
    }

    /// The peer broke framing: says so and ends the connection (NVMe/TCP 1.1 §3.5.2).
    pub(super) fn protocol_error(&mut self, fault: HeaderFault, now: Instant) {
        let header = self.framer.header();
        let repeated = header[..header.len().min(TERM_REQ_DATA_MAX_BYTES)].to_vec();
        let mut common = CommonHeader::bare(PduType::C2HTermReq);
        common.plen += repeated.len() as u32;
        let request = TermReq { common, fes: fault.error as u16, fei: fault.info };
        self.close(CloseReason::ProtocolError { error: fault.error, info: fault.info });
        self.output.push(&request.encode());
        self.output.push(&repeated);
        self.close_by = Some(now + TERM_REQ_TIMEOUT);
    }
}
