//! Get Log Page (NVMe Base 2.0 §5.16): cuts the piece asked for out of a page.
//!
//! It must not know what is in a page. Invariant: an answer is as long as the command asked, zero where the page
//! has ended; memory is bounded by the largest transfer, which is checked before.

use crate::wire::Status;
use crate::wire::log_pages::GetLogPage;

/// Checks what can be checked before the page is made.
pub fn check(get: &GetLogPage, max_transfer_bytes: u64) -> Result<(), Status> {
    let aligned = get.offset.is_multiple_of(4);
    // No page here is a list that an index could point into.
    if !aligned || get.offset_is_index || get.len_bytes > max_transfer_bytes {
        return Err(Status::INVALID_FIELD.dnr());
    }
    Ok(())
}

/// The piece of `page` that `get` asks for.
pub fn piece(page: &[u8], get: &GetLogPage) -> Result<Vec<u8>, Status> {
    let invalid = Status::INVALID_FIELD.dnr();
    let offset = usize::try_from(get.offset).map_err(|_| invalid)?;
    let len = usize::try_from(get.len_bytes).map_err(|_| invalid)?;
    let rest = page.get(offset..).ok_or(invalid)?;
    let mut piece = rest.get(..len.min(rest.len())).unwrap_or_default().to_vec();
    piece.resize(len, 0);
    Ok(piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(offset: u64, len_bytes: u64) -> GetLogPage {
        GetLogPage { lid: 1, retain_event: false, len_bytes, offset, offset_is_index: false }
    }

    fn read(offset: u64, len_bytes: u64) -> Result<Vec<u8>, Status> {
        let page: Vec<u8> = (0..64).collect();
        let get = get(offset, len_bytes);
        check(&get, 4096)?;
        piece(&page, &get)
    }

    /// H43: up to the page's size there is data and then zeroes; beyond it the command is refused.
    #[test]
    fn h43_offsets_and_lengths_at_the_end_of_a_page() {
        let refused = Err(Status::INVALID_FIELD.dnr());
        assert_eq!(read(60, 4), Ok(vec![60, 61, 62, 63]));
        assert_eq!(read(60, 8), Ok(vec![60, 61, 62, 63, 0, 0, 0, 0]));
        assert_eq!(read(64, 4), Ok(vec![0; 4]));
        assert_eq!(read(68, 4), refused);
        assert_eq!(read(2, 4), refused);
        assert_eq!(read(1 << 32, 4), refused);
        assert_eq!(read(u64::MAX - 3, 4), refused);
        assert_eq!(read(0, 8192), refused, "over the largest transfer");
        assert_eq!(read(0, 4096).map(|p| p.len()), Ok(4096));
        let index = GetLogPage { offset_is_index: true, ..get(0, 4) };
        assert_eq!(check(&index, 4096), Err(Status::INVALID_FIELD.dnr()));
    }
}
