//! What the pool's volumes are expected to be: the oracle of a whole run.
//!
//! Owns which volumes there are, how large, and what their blocks may hold. Must not know members or faults. Invariant: what
//! was in doubt when the power failed is in doubt only until the next mount has shown it.

use std::cell::RefCell;
use std::rc::Rc;

use super::super::super::{Pool, VolumeStatus};
use super::super::harness::SharedModel;
use super::super::model::Model;
use super::plan::{At, NAMES, Plan};

/// One volume.
#[derive(Clone)]
struct Known {
    name: String,
    /// `None`: in doubt.
    there: Option<bool>,
    /// A call that changes it is under way.
    busy: bool,
    /// Its sizes in blocks that are possible.
    sizes: Vec<u64>,
    block_bytes: u32,
    model: SharedModel,
}

/// All volumes of a plan.
#[derive(Clone)]
pub struct Expected(Vec<Known>);

impl Expected {
    /// The first volume is there.
    pub fn of(plan: &Plan) -> Self {
        let spec = |volume: usize| plan.specs.get(volume).unwrap_or(&plan.specs[0]);
        let known = NAMES.iter().enumerate().map(|(volume, name)| Known {
            name: (*name).to_owned(),
            there: Some(volume == 0),
            busy: false,
            sizes: vec![spec(volume).size_bytes / u64::from(spec(volume).block_bytes)],
            block_bytes: spec(volume).block_bytes,
            model: fresh(),
        });
        Self(known.collect())
    }

    /// One of its own, for a look at a copy of the members.
    pub fn copy(&self) -> Self {
        let copy =
            |known: &Known| Known { model: Rc::new(RefCell::new(known.model.borrow().clone())), ..known.clone() };
        Self(self.0.iter().map(copy).collect())
    }

    /// The blocks of a volume that is there for certain, if they are within it.
    pub fn usable(&self, at: &At) -> Option<SharedModel> {
        let known = &self.0[at.volume];
        let within = known.sizes.iter().all(|blocks| at.lba + at.count <= *blocks);
        (known.there == Some(true) && within).then(|| Rc::clone(&known.model))
    }

    /// Begins to change a volume that is there, or is not; `false` if it is otherwise, or being changed.
    pub fn begin(&mut self, volume: usize, there: bool) -> bool {
        let known = &mut self.0[volume];
        let can = known.there == Some(there) && !known.busy;
        known.busy |= can;
        can
    }

    pub fn begin_create(&mut self, volume: usize, blocks: u64) {
        let known = &mut self.0[volume];
        (known.there, known.sizes, known.model) = (None, vec![blocks], fresh());
    }

    /// Begins to take a snapshot or to make a clone; `false` if that is not possible now.
    pub fn begin_copy(&mut self, of: usize, to: usize) -> bool {
        let can = |known: &Known, there| known.there == Some(there) && !known.busy;
        if !can(&self.0[of], true) || !can(&self.0[to], false) {
            return false;
        }
        self.0[of].busy = true;
        let origin = self.0[of].clone();
        let known = &mut self.0[to];
        (known.there, known.busy, known.sizes) = (None, true, origin.sizes);
        (known.block_bytes, known.model) = (origin.block_bytes, origin.model.borrow_mut().begin_copy());
        true
    }

    /// That has ended.
    pub fn end_copy(&mut self, of: usize, to: usize, there: bool) {
        self.0[of].busy = false;
        self.0[of].model.borrow_mut().end_copies();
        self.end(to, there, None);
    }

    pub fn begin_delete(&mut self, volume: usize) {
        self.0[volume].there = None;
    }

    pub fn begin_grow(&mut self, volume: usize, blocks: u64) {
        self.0[volume].sizes.push(blocks);
    }

    /// The change has ended: the volume is there or not, and as large.
    pub fn end(&mut self, volume: usize, there: bool, blocks: Option<u64>) {
        let known = &mut self.0[volume];
        (known.there, known.busy) = (Some(there), false);
        match blocks {
            Some(blocks) => known.sizes = vec![blocks],
            None => known.sizes.truncate(1),
        }
    }

    /// The power failed.
    pub fn crash(&mut self) {
        for known in &mut self.0 {
            known.busy = false;
            known.model.borrow_mut().crash();
        }
    }

    /// A mount shows which volumes there are.
    pub fn mounted(&mut self, pool: &Pool) {
        let shown = pool.volumes();
        for status in &shown {
            assert!(self.0.iter().any(|known| known.name == status.name), "a volume that nobody made: {status:?}");
        }
        for known in &mut self.0 {
            known.show(shown.iter().find(|status| status.name == known.name));
        }
    }

    /// Volumes that are there for certain, with what they may hold.
    pub fn there(&self) -> Vec<(usize, String, SharedModel)> {
        let there = self.0.iter().enumerate().filter(|(_, known)| known.there == Some(true) && !known.busy);
        there.map(|(volume, known)| (volume, known.name.clone(), Rc::clone(&known.model))).collect()
    }
}

fn fresh() -> SharedModel {
    Rc::new(RefCell::new(Model::default()))
}

impl Known {
    fn show(&mut self, status: Option<&VolumeStatus>) {
        let name = &self.name;
        match (self.there, status) {
            (Some(true), None) => panic!("volume {name} is gone"),
            (Some(false), Some(_)) => panic!("volume {name} is back"),
            _ => self.there = Some(status.is_some()),
        }
        if let Some(status) = status {
            let blocks = status.size_bytes / u64::from(self.block_bytes);
            assert!(self.sizes.contains(&blocks), "volume {name} has {blocks} blocks, may have {:?}", self.sizes);
            self.sizes = vec![blocks];
        }
    }
}
