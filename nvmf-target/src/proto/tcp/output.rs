//! Bytes on their way out: headers and small data in one run of control bytes, large data in the buffers it came in.
//!
//! Invariant: bytes leave in the order in which they were pushed; a held buffer is let go when its last byte has
//! been taken by the socket, not before. Digests are computed over these very bytes, which nobody else can change.

use std::collections::VecDeque;
use std::io::IoSlice;

use crate::buffer::IoBuf;

/// Data up to this is copied: one slice for many answers beats one slice each.
const COPY_MAX_BYTES: usize = 4096;
/// Most slices that one writev takes without being split by the kernel is IOV_MAX = 1024; stay well under it.
const SLICES_MAX: usize = 256;

/// Names a buffer that is held for sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeldKey(usize);

#[derive(Debug)]
enum Chunk {
    /// That many of the control bytes.
    Control(usize),
    /// A part of a held buffer.
    Data { key: HeldKey, start: usize, end: usize },
}

#[derive(Debug)]
struct Held {
    buffer: IoBuf,
    chunks: usize,
    /// Nothing more of it will be pushed: drop it when its last chunk has gone.
    drop_when_sent: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Output {
    control: Vec<u8>,
    control_sent: usize,
    chunks: VecDeque<Chunk>,
    /// Bytes of the front chunk that are gone.
    front_sent: usize,
    held: Vec<Option<Held>>,
    /// Unused places of `held`.
    free: Vec<usize>,
    pushed_bytes: u64,
    sent_bytes: u64,
    /// Stream positions at which an answer ends.
    marks: VecDeque<u64>,
}

impl Output {
    pub(crate) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Bytes that wait.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.pushed_bytes - self.sent_bytes
    }

    /// Bytes that are gone, since the connection began.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Answers whose last byte hasn't gone.
    pub(crate) fn unsent_marks(&self) -> usize {
        self.marks.len()
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.reclaim_control();
        self.control.extend_from_slice(bytes);
        self.pushed_bytes += bytes.len() as u64;
        match self.chunks.back_mut() {
            Some(Chunk::Control(len)) => *len += bytes.len(),
            _ => self.chunks.push_back(Chunk::Control(bytes.len())),
        }
    }

    /// An answer ends here.
    pub(crate) fn mark(&mut self) {
        self.marks.push_back(self.pushed_bytes);
    }

    pub(crate) fn hold(&mut self, buffer: IoBuf) -> HeldKey {
        let held = Held { buffer, chunks: 0, drop_when_sent: false };
        let index = self.free.pop().unwrap_or_else(|| {
            self.held.push(None);
            self.held.len() - 1
        });
        self.held[index] = Some(held);
        HeldKey(index)
    }

    pub(crate) fn bytes(&self, key: HeldKey) -> &[u8] {
        self.held[key.0].as_ref().map_or(&[], |held| &held.buffer)
    }

    pub(crate) fn push_held(&mut self, key: HeldKey, start: usize, end: usize) {
        let Some(held) = self.held[key.0].as_mut() else { return };
        if end - start > COPY_MAX_BYTES {
            held.chunks += 1;
            self.chunks.push_back(Chunk::Data { key, start, end });
            self.pushed_bytes += (end - start) as u64;
            return;
        }
        // Taken out for the copy, as `push` needs all of self.
        if let Some(held) = self.held[key.0].take() {
            self.push(&held.buffer[start..end]);
            self.held[key.0] = Some(held);
        }
    }

    /// Nothing more of this buffer will be pushed; it is dropped once its bytes are gone.
    pub(crate) fn release(&mut self, key: HeldKey) {
        if let Some(held) = self.held[key.0].as_mut() {
            held.drop_when_sent = true;
            self.drop_if_done(key);
        }
    }

    /// Bytes of the buffer itself still wait.
    pub(crate) fn is_waiting(&self, key: HeldKey) -> bool {
        self.held.get(key.0).and_then(Option::as_ref).is_some_and(|held| held.chunks > 0)
    }

    /// Takes the buffer back, if none of its bytes wait.
    pub(crate) fn take_back(&mut self, key: HeldKey) -> Option<IoBuf> {
        let held = self.held.get_mut(key.0)?.take_if(|held| held.chunks == 0)?;
        self.free.push(key.0);
        Some(held.buffer)
    }

    /// Takes the buffer back whatever waits: only once nothing is sent any more.
    pub(crate) fn take_back_closed(&mut self, key: HeldKey) -> Option<IoBuf> {
        self.discard();
        let held = self.held.get_mut(key.0)?.take()?;
        self.free.push(key.0);
        Some(held.buffer)
    }

    /// Forgets what waits; held buffers stay until they are taken back or this goes.
    pub(crate) fn discard(&mut self) {
        self.chunks.clear();
        self.marks.clear();
        self.control.clear();
        (self.control_sent, self.front_sent) = (0, 0);
        self.sent_bytes = self.pushed_bytes;
        for held in self.held.iter_mut().flatten() {
            held.chunks = 0;
        }
    }

    pub(crate) fn gather<'a>(&'a self, out: &mut Vec<IoSlice<'a>>) {
        let mut control = self.control_sent;
        let mut skip = self.front_sent;
        for chunk in self.chunks.iter().take(SLICES_MAX) {
            match chunk {
                Chunk::Control(len) => {
                    // `control_sent` counts the front chunk's gone bytes already.
                    let end = control + len - skip;
                    out.push(IoSlice::new(&self.control[control..end]));
                    control = end;
                }
                Chunk::Data { key, start, end } => out.push(IoSlice::new(&self.bytes(*key)[start + skip..*end])),
            }
            skip = 0;
        }
    }

    /// # Panics
    /// If more is said to be sent than waits: a fault of the driver.
    pub(crate) fn sent(&mut self, mut len_bytes: usize) {
        assert!(len_bytes as u64 <= self.pending_bytes(), "more sent than there was");
        self.sent_bytes += len_bytes as u64;
        while len_bytes > 0
            && let Some(front) = self.chunks.front()
        {
            let (chunk_bytes, key) = match front {
                Chunk::Control(len) => (*len, None),
                Chunk::Data { key, start, end } => (end - start, Some(*key)),
            };
            let gone = len_bytes.min(chunk_bytes - self.front_sent);
            len_bytes -= gone;
            self.front_sent += gone;
            if key.is_none() {
                self.control_sent += gone;
            }
            if self.front_sent == chunk_bytes {
                self.pop_front(key);
            }
        }
        while self.marks.front().is_some_and(|end| *end <= self.sent_bytes) {
            self.marks.pop_front();
        }
        self.reclaim_control();
    }

    fn pop_front(&mut self, key: Option<HeldKey>) {
        self.chunks.pop_front();
        self.front_sent = 0;
        if let Some(key) = key {
            if let Some(held) = self.held[key.0].as_mut() {
                held.chunks -= 1;
            }
            self.drop_if_done(key);
        }
    }

    fn drop_if_done(&mut self, key: HeldKey) {
        if self.held[key.0].take_if(|held| held.drop_when_sent && held.chunks == 0).is_some() {
            self.free.push(key.0);
        }
    }

    /// Gives room of sent control bytes back once it is the greater part, so that the copy is amortised.
    fn reclaim_control(&mut self) {
        if self.control_sent == self.control.len() {
            self.control.clear();
            self.control_sent = 0;
        } else if self.control_sent > self.control.len() / 2 {
            self.control.drain(..self.control_sent);
            self.control_sent = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(output: &Output) -> Vec<u8> {
        let mut slices = Vec::new();
        output.gather(&mut slices);
        slices.iter().flat_map(|s| s.iter().copied()).collect()
    }

    #[test]
    fn leaves_in_order_in_any_pieces_and_frees_at_the_last_byte() {
        let pattern: Vec<u8> = (0..20_000u32).map(|i| (i * 7 % 251) as u8).collect();
        for piece in [1, 3, 4096, 5000, 100_000] {
            let mut output = Output::default();
            output.push(b"head");
            let key = output.hold(IoBuf::copy_of(&pattern));
            output.push_held(key, 0, 10_000);
            output.push(b"middle");
            output.push_held(key, 10_000, 19_000);
            output.push_held(key, 19_000, 20_000);
            output.mark();
            output.release(key);
            output.push(b"tail");
            let want = [b"head", &pattern[..10_000], b"middle", &pattern[10_000..], b"tail"].concat();
            let mut got = Vec::new();
            while !output.is_empty() {
                let now = bytes_of(&output);
                let n = now.len().min(piece);
                got.extend_from_slice(&now[..n]);
                output.sent(n);
                assert_eq!(output.unsent_marks(), usize::from(got.len() < want.len() - 4));
            }
            assert!(got == want, "piece of {piece}");
            assert!(output.held.iter().all(Option::is_none));
            assert_eq!(output.pending_bytes(), 0);
        }
    }
}
