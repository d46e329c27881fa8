//! The host's receiving half: from PDUs to completions.

use super::{Completion, HostQueuePair, Pending, Transfer};
use crate::proto::framing::{HeaderFault, Step};
use crate::proto::tcp::CloseReason;
use crate::wire::pdu::{
    C2HData, CommonHeader, FLAG_LAST, FLAG_SUCCESS, FatalError, ICResp, Pdu, PduType, R2T, TermReq,
};
use crate::wire::{CommandId, Cqe, Status};

/// Where CCCID stands in C2HData and R2T, for FEI.
const OFFSET_CCCID: u32 = 8;
/// Where the CQE's CID stands in CapsuleResp, for FEI.
const OFFSET_CQE_CID: u32 = 20;

/// The C2HData that is being received.
#[derive(Debug)]
pub(super) enum Incoming {
    Nothing,
    Data { cid: CommandId, at: usize, len_bytes: u32, last: bool, success: bool },
}

impl Incoming {
    pub(super) fn place<'a>(&self, commands: &'a mut [Option<Pending>]) -> &'a mut [u8] {
        let Self::Data { cid, at, .. } = self else { return &mut [] };
        match commands.get_mut(usize::from(cid.0)) {
            Some(Some(Pending { transfer: Transfer::Receiving { buffer, .. }, .. })) => {
                buffer.get_mut(*at..).unwrap_or_default()
            }
            _ => &mut [],
        }
    }

    pub(super) fn advance(&mut self, len_bytes: usize) {
        if let Self::Data { at, .. } = self {
            *at += len_bytes;
        }
    }
}

impl HostQueuePair {
    pub(super) fn advance(&mut self) {
        while self.closing.is_none() {
            let done = match self.framer.step(&self.rules) {
                Ok(Step::Starved) => break,
                Ok(Step::Header(pdu, _)) => self.header(pdu),
                Ok(Step::Data(bytes)) => {
                    let place = self.incoming.place(&mut self.commands);
                    let len = bytes.len().min(place.len());
                    place[..len].copy_from_slice(&bytes[..len]);
                    self.incoming.advance(bytes.len());
                    Ok(())
                }
                Ok(Step::End { intact }) => {
                    self.end(intact);
                    Ok(())
                }
                Err(fault) => Err(fault),
            };
            if let Err(fault) = done {
                self.protocol_error(fault);
            }
        }
    }

    fn header(&mut self, pdu: Pdu) -> Result<(), HeaderFault> {
        match pdu {
            Pdu::ICResp(response) => self.ic_resp(&response),
            Pdu::TermReq(request) => {
                self.close(CloseReason::PeerTerminated { fes: request.fes, fei: request.fei });
            }
            Pdu::CapsuleResp(response) => self.answered(response.cqe)?,
            Pdu::C2HData(data) => self.c2h_data(&data)?,
            Pdu::R2T(r2t) => self.r2t(&r2t)?,
            // `check_common` lets a host receive none of these.
            Pdu::ICReq(_) | Pdu::CapsuleCmd(_) | Pdu::H2CData(_) => return Err(HeaderFault::field(0)),
        }
        Ok(())
    }

    fn ic_resp(&mut self, response: &ICResp) {
        self.rules.connected = true;
        self.rules.header_digest = response.dgst & 1 != 0;
        self.rules.data_digest = response.dgst & 2 != 0;
        self.controller_align_bytes = (usize::from(response.cpda) + 1) * 4;
        self.h2c_data_max_bytes = response.maxh2cdata as usize;
    }

    fn pending(&mut self, cid: CommandId, offset: u32) -> Result<&mut Pending, HeaderFault> {
        let place = self.commands.get_mut(usize::from(cid.0)).and_then(Option::as_mut);
        place.filter(|pending| pending.answered.is_none()).ok_or(HeaderFault::field(offset))
    }

    fn answered(&mut self, cqe: Cqe) -> Result<(), HeaderFault> {
        self.pending(cqe.cid, OFFSET_CQE_CID)?.answered = Some(cqe);
        self.complete_if_sent(cqe.cid);
        Ok(())
    }

    fn c2h_data(&mut self, data: &C2HData) -> Result<(), HeaderFault> {
        let pending = self.pending(data.cccid, OFFSET_CCCID)?;
        let Transfer::Receiving { buffer, come_bytes, last_seen, .. } = &pending.transfer else {
            return Err(HeaderFault::field(OFFSET_CCCID));
        };
        if *last_seen {
            return Err(HeaderFault::of(FatalError::SequenceError));
        }
        let end = u64::from(data.datao) + u64::from(data.datal);
        if data.datao != *come_bytes || end > buffer.len() as u64 {
            return Err(HeaderFault::of(FatalError::DataOutOfRange));
        }
        self.incoming = Incoming::Data {
            cid: data.cccid,
            at: data.datao as usize,
            len_bytes: data.datal,
            last: data.common.has(FLAG_LAST),
            success: data.common.has(FLAG_SUCCESS),
        };
        Ok(())
    }

    /// R2Ts of a command come in the order of its data here, which is all that controllers do.
    fn r2t(&mut self, r2t: &R2T) -> Result<(), HeaderFault> {
        let pending = self.pending(r2t.cccid, OFFSET_CCCID)?;
        let Transfer::Sending { key, len_bytes, asked_bytes } = &mut pending.transfer else {
            return Err(HeaderFault::field(OFFSET_CCCID));
        };
        let end = u64::from(r2t.r2to) + u64::from(r2t.r2tl);
        if r2t.r2to != *asked_bytes || end > u64::from(*len_bytes) {
            return Err(HeaderFault::of(FatalError::DataOutOfRange));
        }
        *asked_bytes += r2t.r2tl;
        let key = *key;
        self.send_data(key, r2t);
        Ok(())
    }

    fn end(&mut self, data_intact: bool) {
        let incoming = std::mem::replace(&mut self.incoming, Incoming::Nothing);
        let Incoming::Data { cid, len_bytes, last, success, .. } = incoming else { return };
        let Some(Some(pending)) = self.commands.get_mut(usize::from(cid.0)) else { return };
        if let Transfer::Receiving { come_bytes, intact, last_seen, .. } = &mut pending.transfer {
            *come_bytes += len_bytes;
            *intact &= data_intact;
            *last_seen = last;
        }
        if success {
            self.complete(cid, Cqe { sqhd: u16::MAX, ..Cqe::of(cid, Status::SUCCESS) }, true);
        }
    }

    /// Completes an answered command whose buffer the output doesn't need any more.
    pub(super) fn complete_if_sent(&mut self, cid: CommandId) {
        let Some(Some(pending)) = self.commands.get(usize::from(cid.0)) else { return };
        let Some(cqe) = pending.answered else { return };
        match pending.transfer {
            Transfer::Sending { key, .. } if self.output.is_waiting(key) => self.unsent.push(cid),
            _ => self.complete(cid, cqe, false),
        }
    }

    fn complete(&mut self, cid: CommandId, cqe: Cqe, by_success_flag: bool) {
        let Some(pending) = self.commands.get_mut(usize::from(cid.0)).and_then(Option::take) else { return };
        let (buffer, received_bytes, intact) = match pending.transfer {
            Transfer::None => (None, 0, true),
            Transfer::Sending { key, .. } => (self.output.take_back(key), 0, true),
            Transfer::Receiving { buffer, come_bytes, intact, .. } => (Some(buffer), come_bytes, intact),
        };
        self.free.push_back(cid.0);
        self.outstanding -= 1;
        let context = pending.context;
        self.completions.push_back(Completion { cid, context, cqe, buffer, received_bytes, intact, by_success_flag });
    }

    /// The controller broke framing: says so and ends the connection.
    fn protocol_error(&mut self, fault: HeaderFault) {
        let repeated = self.framer.header().to_vec();
        let mut common = CommonHeader::bare(PduType::H2CTermReq);
        common.plen += repeated.len() as u32;
        let request = TermReq { common, fes: fault.error as u16, fei: fault.info };
        self.close(CloseReason::ProtocolError { error: fault.error, info: fault.info });
        self.output.push(&request.encode());
        self.output.push(&repeated);
    }
}
