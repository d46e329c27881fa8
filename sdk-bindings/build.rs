//! Compiles the C shim and links DPDK: only the libraries that the shim uses, from their static archives where
//! they exist (the shared ones load every driver of the distribution at start-up, 150-300 ms and 25 MB).

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=csrc");
    #[cfg(feature = "dpdk")]
    dpdk::build();
}

#[cfg(feature = "dpdk")]
mod dpdk {
    use std::path::PathBuf;

    /// In link order: users before what they use. `log` and `argparse` were parts of `eal` before 24.03.
    const LIBRARIES: [&str; 8] = ["mempool_ring", "mempool", "ring", "eal", "argparse", "telemetry", "kvargs", "log"];
    const OPTIONAL: [&str; 2] = ["argparse", "log"];
    /// What EAL itself needs from the system. Which of them, the distribution's build decides.
    const SYSTEM_LIBRARIES: [&str; 6] = ["numa", "bsd", "archive", "atomic", "rt", "fdt"];
    const MISSING: &str = "DPDK's development files are missing: `apt install libdpdk-dev` (22.11 or newer), \
                           or build without them: `cargo build --no-default-features`";

    pub(crate) fn build() {
        let mut probe = pkg_config::Config::new();
        probe.cargo_metadata(false).env_metadata(true).atleast_version("22.11");
        let shared = probe.probe("libdpdk").unwrap_or_else(|error| fail(&error));
        let statics = probe.statik(true).probe("libdpdk").unwrap_or_else(|error| fail(&error));
        compile(&shared);
        if !link_static(&directories(&statics), &statics.libs) {
            link_shared(&shared);
        }
    }

    fn fail(error: &pkg_config::Error) -> ! {
        eprintln!("error: {MISSING}\n\n{error}");
        std::process::exit(1);
    }

    fn compile(library: &pkg_config::Library) {
        let mut shim = cc::Build::new();
        shim.file("csrc/shim.c").std("gnu11").warnings(true).flag("-include").flag("rte_config.h");
        for path in &library.include_paths {
            shim.flag("-isystem").flag(path);
        }
        // DPDK's headers need the instruction set that the library was built for.
        let target = std::env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
        match target.as_str() {
            "x86_64" => shim.flag("-march=corei7"),
            "aarch64" => shim.flag_if_supported("-march=armv8-a+crc"),
            _ => &mut shim,
        };
        shim.compile("sluice_shim");
    }

    fn directories(library: &pkg_config::Library) -> Vec<PathBuf> {
        let mut paths = library.link_paths.clone();
        for file in &library.link_files {
            paths.extend(file.parent().map(PathBuf::from));
        }
        if let Ok(dir) = pkg_config::get_variable("libdpdk", "libdir") {
            paths.push(dir.into());
        }
        paths
    }

    fn link_static(paths: &[PathBuf], listed: &[String]) -> bool {
        let holds = |dir: &PathBuf, name: &str| dir.join(format!("librte_{name}.a")).is_file();
        let needed = LIBRARIES.iter().filter(|name| !OPTIONAL.contains(name));
        let Some(dir) = paths.iter().find(|dir| needed.clone().all(|name| holds(dir, name))) else { return false };
        println!("cargo:rustc-link-search=native={}", dir.display());
        for name in LIBRARIES.iter().filter(|name| holds(dir, name)) {
            // Whole archives: drivers and log types register themselves in constructors that nothing refers to.
            println!("cargo:rustc-link-lib=static:+whole-archive,-bundle=rte_{name}");
        }
        for name in SYSTEM_LIBRARIES.iter().filter(|name| listed.iter().any(|lib| lib == *name)) {
            println!("cargo:rustc-link-lib=dylib={name}");
        }
        true
    }

    fn link_shared(library: &pkg_config::Library) {
        for path in &library.link_paths {
            println!("cargo:rustc-link-search=native={}", path.display());
        }
        for name in LIBRARIES.iter().map(|name| format!("rte_{name}")) {
            if library.libs.contains(&name) || name == "rte_mempool_ring" {
                println!("cargo:rustc-link-lib=dylib={name}");
            }
        }
    }
}
