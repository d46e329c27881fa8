//! Header and data digests: CRC32C, least significant byte first (NVMe/TCP 1.1 §3.4.1.1).

/// Bytes of a digest on the wire.
pub const DIGEST_BYTES: usize = 4;

/// A digest over bytes that come in pieces.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Digest(u32);

impl Digest {
    /// The digest of no bytes.
    pub fn new() -> Self {
        Self(0)
    }

    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(crc32c::crc32c(bytes))
    }

    /// Takes in the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0 = crc32c::crc32c_append(self.0, bytes);
    }

    /// As sent.
    pub fn to_bytes(self) -> [u8; DIGEST_BYTES] {
        self.0.to_le_bytes()
    }

    /// As received.
    pub fn from_bytes(bytes: [u8; DIGEST_BYTES]) -> Self {
        Self(u32::from_le_bytes(bytes))
    }

    /// The value, for the FEI field of a TermReq.
    pub fn value(self) -> u32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_vectors() {
        // RFC 3720 appendix B.4.
        assert_eq!(Digest::of(&[0; 32]).to_bytes(), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(Digest::of(&[0xff; 32]).to_bytes(), [0x43, 0xab, 0xa8, 0x62]);
        let mut pieces = Digest::new();
        pieces.update(b"1234");
        pieces.update(b"56789");
        assert_eq!(pieces.value(), 0xe306_9283);
    }
}
