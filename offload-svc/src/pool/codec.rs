//! Little-endian reading and writing of the pool's own structures.
//!
//! Owns bounds: a reader never panics on bytes from a member, it runs dry. Must not know what the bytes mean.
//! Invariant: what [`Writer`] writes, [`Reader`] reads back.

/// The bytes ended before the structure did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("structure cut short")]
pub struct CutShort;

/// Reads fields off the front of a slice.
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], CutShort> {
        let (head, tail) = self.0.split_at_checked(len).ok_or(CutShort)?;
        self.0 = tail;
        Ok(head)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], CutShort> {
        let (head, tail) = self.0.split_first_chunk::<N>().ok_or(CutShort)?;
        self.0 = tail;
        Ok(*head)
    }

    pub fn u8(&mut self) -> Result<u8, CutShort> {
        Ok(self.array::<1>()?[0])
    }

    pub fn u16(&mut self) -> Result<u16, CutShort> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub fn u32(&mut self) -> Result<u32, CutShort> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, CutShort> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub fn u128(&mut self) -> Result<u128, CutShort> {
        Ok(u128::from_le_bytes(self.array()?))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Appends fields to a vector.
#[derive(Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub fn u128(&mut self, value: u128) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Zeroes up to `len` bytes in all.
    pub fn pad_to(&mut self, len: usize) -> &mut Self {
        debug_assert!(self.0.len() <= len, "structure longer than its place");
        self.0.resize(len, 0);
        self
    }
}
