//! Free hugepages, as the kernel lists them.
//!
//! Owns the look at sysfs and the advice where there are too few. Must not know DPDK. Invariant: what is counted are
//! pages that this process could have now, on nodes that it may use.

use std::fmt;
use std::fs;
use std::path::Path;

/// Free pages of one size on one memory node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreePages {
    /// The node.
    pub node: u32,
    /// The pages' size in KiB.
    pub page_kib: u64,
    /// How many are free.
    pub free: u64,
}

/// Too few hugepages where they are a must.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "reactors.hugepages = \"on\": needed {needed_mib} MiB, found {}; run `sysctl -w vm.nr_hugepages={}` or set \"auto\"",
    Found(found),
    pages_needed(*needed_mib, found)
)]
pub struct HugePageShortage {
    /// What DPDK needs.
    pub needed_mib: u32,
    /// What there is.
    pub found: Vec<FreePages>,
}

/// Prints what was found, per node.
struct Found<'a>(&'a [FreePages]);

impl fmt::Display for Found<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no hugepages in this kernel");
        }
        for (i, pages) in self.0.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            write!(f, "{separator}{} x {} KiB free on node {}", pages.free, pages.page_kib, pages.node)?;
        }
        Ok(())
    }
}

/// Pages of the kernel's usual size (2 MiB) that there would have to be.
fn pages_needed(needed_mib: u32, found: &[FreePages]) -> u64 {
    let usual = 2;
    let free: u64 = found.iter().filter(|pages| pages.page_kib == usual << 10).map(|pages| pages.free).sum();
    u64::from(needed_mib).div_ceil(usual).max(free + 1)
}

/// Free hugepages of this machine.
pub(crate) fn find() -> Vec<FreePages> {
    let nodes = by_node(Path::new("/sys/devices/system/node"));
    if nodes.is_empty() { on_node(Path::new("/sys/kernel/mm"), 0) } else { nodes }
}

fn by_node(nodes: &Path) -> Vec<FreePages> {
    let Ok(entries) = fs::read_dir(nodes) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("node")).and_then(|number| number.parse().ok());
        if let Some(node) = number {
            found.extend(on_node(&entry.path(), node));
        }
    }
    found.sort_by_key(|pages| (pages.node, pages.page_kib));
    found
}

fn on_node(folder: &Path, node: u32) -> Vec<FreePages> {
    let Ok(entries) = fs::read_dir(folder.join("hugepages")) else { return Vec::new() };
    let pages = entries.flatten().filter_map(|entry| {
        let name = entry.file_name();
        let page_kib = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let free = fs::read_to_string(entry.path().join("free_hugepages")).ok()?.trim().parse().ok()?;
        Some(FreePages { node, page_kib, free })
    });
    pages.collect()
}

/// Whether `needed_mib` fit: DPDK takes pages of any sizes and nodes together.
pub(crate) fn suffice(found: &[FreePages], needed_mib: u32) -> bool {
    let mib = |pages: &FreePages| pages.page_kib.saturating_mul(pages.free) >> 10;
    found.iter().map(mib).fold(0, u64::saturating_add) >= u64::from(needed_mib)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(pages: &[(u32, u64, u64)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (node, kib, free) in pages {
            let folder = dir.path().join(format!("node{node}/hugepages/hugepages-{kib}kB"));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("free_hugepages"), format!("{free}\n")).unwrap();
        }
        dir
    }

    #[test]
    fn h147_pages_are_counted_per_node_and_size() {
        let dir = tree(&[(1, 2048, 10), (0, 2048, 3), (0, 1_048_576, 1)]);
        let found = by_node(dir.path());
        let page = |node, page_kib, free| FreePages { node, page_kib, free };
        assert_eq!(found, [page(0, 2048, 3), page(0, 1_048_576, 1), page(1, 2048, 10)]);
        assert!(suffice(&found, 1024 + 26) && !suffice(&found, 1024 + 27));
        assert!(!suffice(&[], 1));
    }

    #[test]
    fn h147_a_shortage_names_needed_found_and_the_command() {
        let dir = tree(&[(0, 2048, 3)]);
        let shortage = HugePageShortage { needed_mib: 301, found: by_node(dir.path()) };
        assert_eq!(
            shortage.to_string(),
            "reactors.hugepages = \"on\": needed 301 MiB, found 3 x 2048 KiB free on node 0; \
             run `sysctl -w vm.nr_hugepages=151` or set \"auto\""
        );
        let none = HugePageShortage { needed_mib: 2, found: Vec::new() };
        assert!(none.to_string().contains("no hugepages in this kernel"));
    }
}
