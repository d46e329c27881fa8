//! Tests of the pool as a whole, on simulated members.

mod basic;
mod beneath;
mod cleaning;
mod crash;
mod cut;
mod faults;
mod harness;
mod keys;
mod lost;
mod map;
mod media;
mod model;
mod rebuild;
mod receipts;
mod replay;
mod requests;
mod rolled_back;
mod scrub;
mod sim;
mod slow;
mod snapshot;
mod space;
mod upkeep;
