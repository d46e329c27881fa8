//! A host that builds its PDUs byte by byte, honest or not.

use super::pair::{Pair, PairConfig, connect_sqe};
use crate::wire::digest::Digest;
use crate::wire::pdu::{
    C2HData, COMMON_HEADER_BYTES, CapsuleCmd, CapsuleResp, CommonHeader, FLAG_DATA_DIGEST, FLAG_HEADER_DIGEST,
    FLAG_LAST, H2CData, ICReq, Pdu, PduType, R2T, TermReq,
};
use crate::wire::{CommandId, SglDescriptor, Sqe};

/// One PDU from the target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawReply {
    /// The header.
    pub pdu: Pdu,
    /// What follows it, without digests and padding.
    pub data: Vec<u8>,
}

/// See the module.
pub struct RawHost {
    /// The other end.
    pub pair: Pair,
    header_digest: bool,
    data_digest: bool,
}

impl RawHost {
    /// Connected without digests.
    pub fn connected(config: PairConfig) -> Self {
        Self::with_digests(config, false, false)
    }

    /// Connected with the digests asked for, and HPDA as the config's host has it.
    pub fn with_digests(config: PairConfig, header_digest: bool, data_digest: bool) -> Self {
        let mut host = Self::fresh(config);
        (host.header_digest, host.data_digest) = (header_digest, data_digest);
        host.pair.send_raw(&host.ic_req());
        let sqe = connect_sqe();
        let mut bytes = host.capsule(sqe, 0xffff, Some(&[0; 1024]));
        // The answer to ICReq comes first: digests start after it.
        assert!(matches!(host.receive().as_slice(), [RawReply { pdu: Pdu::ICResp(_), .. }]));
        host.pair.send_raw(&bytes);
        bytes.clear();
        assert!(matches!(host.receive().as_slice(), [RawReply { pdu: Pdu::CapsuleResp(_), .. }]));
        host
    }

    /// Nothing sent yet.
    pub fn fresh(config: PairConfig) -> Self {
        Self { pair: Pair::new(config), header_digest: false, data_digest: false }
    }

    /// Changes which digests it adds and checks.
    pub fn set_digests(&mut self, header_digest: bool, data_digest: bool) {
        (self.header_digest, self.data_digest) = (header_digest, data_digest);
    }

    /// ICReq with this host's digests.
    pub fn ic_req(&self) -> Vec<u8> {
        let request = ICReq {
            common: CommonHeader::bare(PduType::ICReq),
            pfv: 0,
            hpda: 0,
            dgst: u8::from(self.header_digest) | u8::from(self.data_digest) << 1,
            maxr2t: 0,
        };
        request.encode().to_vec()
    }

    /// A command capsule; `data` goes in the capsule with an SGL that says so.
    pub fn capsule(&self, mut sqe: Sqe, cid: u16, data: Option<&[u8]>) -> Vec<u8> {
        sqe.set_command_id(CommandId(cid));
        if let Some(data) = data {
            sqe.set_sgl(SglDescriptor::in_capsule(0, data.len() as u32));
        }
        self.capsule_as_is(sqe, data)
    }

    /// A command capsule whose SGL is the command's own.
    pub fn capsule_as_is(&self, sqe: Sqe, data: Option<&[u8]>) -> Vec<u8> {
        let common = self.common(PduType::CapsuleCmd, 0, data.map(<[u8]>::len));
        self.finish(CapsuleCmd { common, sqe }.encode().to_vec(), data)
    }

    /// H2CData.
    pub fn h2c(&self, cid: u16, ttag: u16, datao: u32, data: &[u8], last: bool) -> Vec<u8> {
        let flags = if last { FLAG_LAST } else { 0 };
        let common = self.common(PduType::H2CData, flags, Some(data.len()));
        let header = H2CData { common, cccid: CommandId(cid), ttag, datao, datal: data.len() as u32 };
        self.finish(header.encode().to_vec(), Some(data))
    }

    fn common(&self, pdu_type: PduType, flags: u8, data_bytes: Option<usize>) -> CommonHeader {
        let mut common = CommonHeader::bare(pdu_type);
        common.flags = flags;
        if self.header_digest {
            common.flags |= FLAG_HEADER_DIGEST;
            common.plen += 4;
        }
        if let Some(data_bytes) = data_bytes {
            common.pdo = common.plen as u8;
            common.plen += data_bytes as u32;
            if self.data_digest {
                common.flags |= FLAG_DATA_DIGEST;
                common.plen += 4;
            }
        }
        common
    }

    /// Adds what follows the header.
    pub fn finish(&self, mut header: Vec<u8>, data: Option<&[u8]>) -> Vec<u8> {
        if self.header_digest {
            header.extend(Digest::of(&header).to_bytes());
        }
        if let Some(data) = data {
            header.extend(data);
            if self.data_digest {
                header.extend(Digest::of(data).to_bytes());
            }
        }
        header
    }

    /// Sends bytes, runs the target and gives the PDUs that it sent.
    pub fn exchange(&mut self, bytes: &[u8]) -> Vec<RawReply> {
        self.pair.send_raw(bytes);
        self.receive()
    }

    /// Runs the target and gives the PDUs that it sent.
    ///
    /// # Panics
    /// If they aren't whole and right.
    pub fn receive(&mut self) -> Vec<RawReply> {
        self.pair.run_raw();
        let bytes = self.pair.take_raw();
        let mut rest = bytes.as_slice();
        let mut replies = Vec::new();
        while rest.len() >= COMMON_HEADER_BYTES {
            let common = CommonHeader::decode(rest).expect("eight bytes are there");
            let (whole, behind) = rest.split_at(common.plen as usize);
            replies.push(self.decode(&common, whole));
            rest = behind;
        }
        assert!(rest.is_empty(), "a PDU was cut short");
        replies
    }

    fn decode(&self, common: &CommonHeader, whole: &[u8]) -> RawReply {
        let pdu = Pdu::decode(whole).expect("the target sends right PDUs");
        let hlen = usize::from(common.hlen);
        if common.has(FLAG_HEADER_DIGEST) {
            assert!(self.header_digest, "a header digest that nobody asked for");
            assert_eq!(whole[hlen..hlen + 4], Digest::of(&whole[..hlen]).to_bytes(), "header digest");
        }
        let data = match &pdu {
            Pdu::C2HData(C2HData { datal, .. }) => {
                let data = &whole[usize::from(common.pdo)..][..*datal as usize];
                if common.has(FLAG_DATA_DIGEST) {
                    assert!(self.data_digest, "a data digest that nobody asked for");
                    assert_eq!(whole[whole.len() - 4..], Digest::of(data).to_bytes(), "data digest");
                }
                data.to_vec()
            }
            Pdu::TermReq(_) => whole[hlen..].to_vec(),
            _ => Vec::new(),
        };
        RawReply { pdu, data }
    }
}

impl RawReply {
    /// The completion, if it is one.
    pub fn completion(&self) -> Option<&CapsuleResp> {
        if let Pdu::CapsuleResp(response) = &self.pdu { Some(response) } else { None }
    }

    /// The R2T, if it is one.
    pub fn r2t(&self) -> Option<&R2T> {
        if let Pdu::R2T(r2t) = &self.pdu { Some(r2t) } else { None }
    }

    /// The C2HData, if it is one.
    pub fn c2h(&self) -> Option<&C2HData> {
        if let Pdu::C2HData(data) = &self.pdu { Some(data) } else { None }
    }

    /// The TermReq, if it is one.
    pub fn term_req(&self) -> Option<&TermReq> {
        if let Pdu::TermReq(request) = &self.pdu { Some(request) } else { None }
    }
}
