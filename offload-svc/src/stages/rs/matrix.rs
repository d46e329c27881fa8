//! Matrices over GF(2^8) modulo 0x11D, and the generator's coefficients.
//!
//! Owns the algebra of plans, on small matrices off the data path. Must not know shards. Invariant: no call divides by
//! zero or panics on a matrix of the size it names.

use reed_solomon_erasure::galois_8;

use super::MAX_SHARDS;

/// The generator's coefficient of data shard `data` in parity shard `parity`: see [`super::Code`].
///
/// # Panics
/// If either is 32 or more: a code has checked its counts.
pub fn coefficient(parity: usize, data: usize) -> u8 {
    assert!(parity < MAX_SHARDS && data < MAX_SHARDS, "shard out of the code's range");
    let (x, y) = (parity as u8, (MAX_SHARDS + data) as u8);
    // x < 32 <= y, so x ^ y is never zero.
    galois_8::div(y, x ^ y)
}

/// `row` (1 x n) times `matrix` (n x n, row-major).
pub fn row_times(row: &[u8], matrix: &[u8]) -> Vec<u8> {
    let n = row.len();
    let mut product = vec![0u8; n];
    for (&factor, line) in row.iter().zip(matrix.chunks_exact(n)) {
        add_scaled(&mut product, factor, line);
    }
    product
}

/// The inverse of a row-major n x n matrix, by Gauss-Jordan; `None` when it has none.
pub fn invert(matrix: &[u8], n: usize) -> Option<Vec<u8>> {
    let mut left: Vec<Vec<u8>> = matrix.chunks_exact(n).map(<[u8]>::to_vec).collect();
    let mut right: Vec<Vec<u8>> = (0..n).map(|i| (0..n).map(|j| u8::from(i == j)).collect()).collect();
    for column in 0..n {
        let pivot = (column..n).find(|&row| left[row][column] != 0)?;
        left.swap(column, pivot);
        right.swap(column, pivot);
        let scale = galois_8::div(1, left[column][column]);
        for value in left[column].iter_mut().chain(right[column].iter_mut()) {
            *value = galois_8::mul(*value, scale);
        }
        let (left_pivot, right_pivot) = (left[column].clone(), right[column].clone());
        for row in (0..n).filter(|&row| row != column) {
            let factor = left[row][column];
            add_scaled(&mut left[row], factor, &left_pivot);
            add_scaled(&mut right[row], factor, &right_pivot);
        }
    }
    Some(right.concat())
}

fn add_scaled(target: &mut [u8], factor: u8, line: &[u8]) {
    for (value, &term) in target.iter_mut().zip(line) {
        *value ^= galois_8::mul(factor, term);
    }
}
