//! Which log pages a controller has, and how each is made.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{AdminController, Role, log_page};
use crate::wire::log_pages::{self, GetLogPage, SmartLog, effect, lid};
use crate::wire::opcode::{admin, nvm};
use crate::wire::{Sqe, Status};

const IO_PAGES: &[u8] =
    &[lid::SUPPORTED, lid::ERROR, lid::SMART, lid::FIRMWARE_SLOT, lid::CHANGED_NAMESPACES, lid::EFFECTS, lid::FEATURES];
const DISCOVERY_PAGES: &[u8] = &[lid::SUPPORTED, lid::ERROR, lid::DISCOVERY];
/// Room temperature, 25 °C, as there is no sensor. "Not reported" can't be said, zero would be read as -273 °C, and how the
/// value is found is left to us: it "may not represent the actual temperature of any physical point" (§5.16.1.3).
const NOMINAL_TEMPERATURE_K: u16 = 298;

impl AdminController {
    pub(super) fn log_page(&mut self, sqe: &Sqe, now: Instant) -> Result<Vec<u8>, Status> {
        let get = GetLogPage::decode(&sqe.0);
        let pages = match self.role {
            Role::Io(_) => IO_PAGES,
            Role::Discovery(_) => DISCOVERY_PAGES,
        };
        if !pages.contains(&get.lid) {
            return Err(Status::INVALID_LOG_PAGE.dnr());
        }
        let max = 4096u64 << self.facts.mdts;
        log_page::check(&get, max)?;
        let page = self.page(get.lid, pages, sqe, now)?;
        let piece = log_page::piece(&page, &get)?;
        if !get.retain_event {
            self.events.log_read(get.lid);
        }
        Ok(piece)
    }

    fn page(&self, id: u8, pages: &[u8], sqe: &Sqe, now: Instant) -> Result<Vec<u8>, Status> {
        match (&self.role, id) {
            (_, lid::SUPPORTED) => Ok(supported_pages(pages)),
            (_, lid::ERROR) => Ok(self.errors.with(|log| log.page())),
            (Role::Io(_), lid::SMART) => {
                // Not kept by namespace (LPA bit 0).
                let nsid = sqe.namespace_id().0;
                if nsid != 0 && nsid != u32::MAX {
                    return Err(Status::INVALID_FIELD.dnr());
                }
                Ok(self.smart(now).encode())
            }
            (Role::Io(_), lid::FIRMWARE_SLOT) => Ok(log_pages::firmware_slots(&self.facts.firmware)),
            (Role::Io(_), lid::CHANGED_NAMESPACES) => {
                Ok(log_pages::changed_namespaces(self.events.changed_namespaces().as_deref()))
            }
            (Role::Io(_), lid::EFFECTS) => Ok(effects()),
            (Role::Io(_), lid::FEATURES) => Ok(feature_effects(self.features.supported())),
            (Role::Discovery(source), lid::DISCOVERY) => {
                let view = source.view();
                Ok(log_pages::discovery_log(view.generation, &view.entries))
            }
            _ => Err(Status::INVALID_LOG_PAGE.dnr()),
        }
    }

    fn smart(&self, now: Instant) -> SmartLog {
        let counters = &self.shared.counters;
        let count = |counter: &std::sync::atomic::AtomicU64| u128::from(counter.load(Ordering::Relaxed));
        let units = |bytes: u128| bytes.div_ceil(u128::from(SmartLog::DATA_UNIT_BYTES));
        let too_warm = self.features.temperature_beyond_threshold(NOMINAL_TEMPERATURE_K);
        SmartLog {
            critical_warning: if too_warm { SmartLog::WARNING_TEMPERATURE } else { 0 },
            temperature_k: NOMINAL_TEMPERATURE_K,
            available_spare: 100,
            data_units_read: units(count(&counters.read_bytes)),
            data_units_written: units(count(&counters.write_bytes)),
            host_reads: count(&counters.read_commands),
            host_writes: count(&counters.write_commands),
            power_on_hours: u128::from(now.saturating_duration_since(self.facts.powered_on).as_secs() / 3600),
            media_errors: count(&counters.media_errors),
            error_log_entries: u128::from(self.errors.with(|log| log.count())),
            ..Default::default()
        }
    }
}

/// Supported Log Pages (§5.16.1.1): LSUPP of each.
fn supported_pages(pages: &[u8]) -> Vec<u8> {
    let entries: Vec<_> = pages.iter().map(|&id| (id, 1)).collect();
    log_pages::supported(&entries)
}

/// Feature Identifiers Supported and Effects (§5.16.1.18): FSUPP, and the scope of each.
fn feature_effects(features: &[(u8, u32)]) -> Vec<u8> {
    const SUPPORTED: u32 = 1;
    const SCOPE_NAMESPACE: u32 = 1 << 20;
    const SCOPE_CONTROLLER: u32 = 1 << 21;
    let namespace_specific = crate::wire::features::capability::NAMESPACE_SPECIFIC;
    let scope = |caps: u32| if caps & namespace_specific != 0 { SCOPE_NAMESPACE } else { SCOPE_CONTROLLER };
    let entries: Vec<_> = features.iter().map(|&(id, caps)| (id, SUPPORTED | scope(caps))).collect();
    log_pages::supported(&entries)
}

fn effects() -> Vec<u8> {
    const ADMIN: &[u8] = &[
        admin::GET_LOG_PAGE,
        admin::IDENTIFY,
        admin::ABORT,
        admin::SET_FEATURES,
        admin::GET_FEATURES,
        admin::ASYNC_EVENT_REQUEST,
        admin::KEEP_ALIVE,
    ];
    const IO_READING: &[u8] = &[nvm::FLUSH, nvm::READ, nvm::COMPARE, nvm::VERIFY];
    const IO_CHANGING: &[u8] = &[nvm::WRITE, nvm::WRITE_ZEROES, nvm::DATASET_MANAGEMENT];
    let with = |list: &[u8], effects| list.iter().map(|&op| (op, effects)).collect::<Vec<_>>();
    let mut io = with(IO_READING, effect::SUPPORTED);
    io.extend(with(IO_CHANGING, effect::SUPPORTED | effect::DATA_CHANGED));
    log_pages::commands_effects(&with(ADMIN, effect::SUPPORTED), &io)
}
