//! Tests of the pool as a whole, on simulated members.

mod basic;
mod harness;
mod model;
mod sim;
