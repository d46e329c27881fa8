//! What each command does, and what it is refused with.

use super::*;

#[test]
fn before_it_is_enabled_a_controller_takes_fabrics_commands_only() {
    let mut both = Both::connect(Role::Io(Arc::new(Three(Mutex::new(false)))), 5000);
    assert_eq!(both.identify(1, 0, 0), Err(Status::COMMAND_SEQUENCE_ERROR));
    assert_eq!(both.plain(Sqe::new(admin::KEEP_ALIVE)).status.code(), Status::COMMAND_SEQUENCE_ERROR);
    assert_eq!(both.property(properties::CAP, true).result(), 0x0000_0020_1E01_007F);
    assert_eq!(both.property(properties::VS, false).result(), 0x2_0000);
    assert_eq!(both.property(properties::CSTS, false).result(), 0);
    assert_eq!(both.shared.state(), ControllerState::Disabled);
    both.set_property(properties::CC, u64::from(Configuration::ENABLED.0));
    assert_eq!(both.property(properties::CSTS, false).result(), 1);
    assert_eq!(both.shared.state(), ControllerState::Ready);
    assert!(both.identify(1, 0, 0).is_ok());
}

#[test]
fn properties_that_are_not_there_and_second_connects_are_refused() {
    let mut both = Both::io();
    assert_eq!(both.property(properties::NSSR, false).status.code(), Status::INVALID_FIELD);
    assert_eq!(both.property(0x1000, true).status.code(), Status::INVALID_FIELD);
    assert_eq!(both.set_property(properties::CAP, 0).status.code(), Status::INVALID_FIELD);
    for (kind, status) in [
        (fabrics::TYPE_DISCONNECT, Status::INVALID_OPCODE),
        (fabrics::TYPE_AUTHENTICATION_RECEIVE, Status::INVALID_OPCODE),
        (0x40, Status::INVALID_OPCODE),
    ] {
        let mut sqe = Sqe::new(fabrics::FABRICS);
        sqe.set_fabrics_type(kind);
        assert_eq!(both.plain(sqe).status.code(), status);
    }
    let mut again = Sqe::new(fabrics::FABRICS);
    again.set_fabrics_type(fabrics::TYPE_CONNECT);
    let done = both.run(again, HostData::ToController(IoBuf::heap(1024)));
    assert_eq!(done.cqe.status.code(), Status::COMMAND_SEQUENCE_ERROR);
}

#[test]
fn identify_controller_says_what_is_true() {
    let mut both = Both::io();
    let bytes = both.identify(1, 0, 0).unwrap();
    let controller = IdentifyController::decode(bytes[..].try_into().unwrap());
    assert_eq!(&controller.sn, b"SN                  ");
    assert_eq!((controller.cntlid, controller.mdts, controller.ver, controller.cntrltype), (7, 8, 0x2_0000, 1));
    assert_eq!((controller.ioccsz, controller.iorcsz, controller.icdoff), (4 + 8192 / 16, 1, 0), "H15");
    assert_eq!((controller.nn, controller.mnan, controller.maxcmd), (1024, 1024, 128));
    assert_eq!((controller.acwu, controller.awun, controller.awupf, controller.fuses), (0, 0, 0, 1));
    assert_eq!((controller.cmic, controller.vwc, controller.kas, controller.aerl), (3, 6, 10, 3));
    assert_eq!((controller.sqes, controller.cqes, controller.msdbd, controller.ofcs), (0x66, 0x44, 1, 0));
    assert_eq!(controller.sgls & (1 << 20 | 1), 1 << 20 | 1);
    assert_eq!(Nqn::from_field(&controller.subnqn).unwrap().as_str(), SUBSYSTEM);
}

/// H47: every CNS that hosts ask for, with nsids that are there, could be there, and can't be.
#[test]
fn h47_identify_is_exact_or_refused() {
    let mut both = Both::io();
    let missing = Err(Status::INVALID_NAMESPACE);
    let invalid = Err(Status::INVALID_FIELD);
    let namespace = IdentifyNamespace::decode(both.identify(0, 1, 0).unwrap()[..].try_into().unwrap());
    assert_eq!((namespace.nsze, namespace.ncap, namespace.nuse), (1001, 1001, 10));
    assert_eq!((namespace.block_bytes(), namespace.dlfeat, namespace.nows), (Some(4096), 9, 15));
    assert_eq!(namespace.nguid, *Uuid::from_u128(1).as_bytes());
    let small = IdentifyNamespace::decode(both.identify(0, 1024, 0).unwrap()[..].try_into().unwrap());
    assert_eq!(small.block_bytes(), Some(512));
    let protected = IdentifyNamespace::decode(both.identify(0, 3, 0).unwrap()[..].try_into().unwrap());
    assert_eq!((namespace.nsattr, protected.nsattr), (0, 1));
    assert_eq!(both.identify(0x08, 3, 0).unwrap()[8], 1);
    for cns in [0x00, 0x05, 0x08, 0x11] {
        assert_eq!(both.identify(cns, 99, 0), Ok(vec![0; 4096]), "CNS {cns:#x}: could exist");
        for nsid in [0, 1025, 0xFFFF_FFFE, 0xFFFF_FFFF] {
            assert_eq!(both.identify(cns, nsid, 0), missing, "CNS {cns:#x}, nsid {nsid:#x}");
        }
    }
    for cns in [0x02, 0x07, 0x10] {
        assert_eq!(decode_namespace_list(&both.identify(cns, 0, 0).unwrap()), [1, 3, 1024]);
        assert_eq!(decode_namespace_list(&both.identify(cns, 3, 0).unwrap()), [1024]);
        assert_eq!(both.identify(cns, 0xFFFF_FFFE, 0), missing);
        assert_eq!(both.identify(cns, 0xFFFF_FFFF, 0), missing);
    }
    assert_eq!(both.identify(0x03, 99, 0), missing);
    assert_eq!(&both.identify(0x03, 3, 0).unwrap()[..4], &[2, 16, 0, 0]);
    assert_eq!(both.identify(0x06, 0, 0).map(|b| b.len()), Ok(4096));
    for (cns, csi) in
        [(0x05, 2), (0x06, 2), (0x07, 2), (0x04, 0), (0x09, 0), (0x14, 0), (0x15, 0), (0x16, 0), (0xFF, 0)]
    {
        assert_eq!(both.identify(cns, 1, csi), invalid, "CNS {cns:#x} CSI {csi}");
    }
    assert_eq!(&both.identify(0x13, 0, 0).unwrap()[..8], &[3, 0, 1, 0, 7, 0, 9, 0]);
    assert_eq!(both.identify(0x12, 2, 0), missing);
    assert_eq!(both.identify(0x1C, 0, 0).unwrap()[0], 1);
    let mut short = Sqe::new(admin::IDENTIFY);
    short.set_dword(10, 1);
    assert_eq!(both.reads(short, 4092), Err(Status::SGL_LENGTH_INVALID), "never more than the host has room for");
}

/// H43 and H45: which pages there are, and where they end.
#[test]
fn h43_h45_log_pages_end_where_they_end() {
    let mut both = Both::io();
    for (lid, size) in [(0x00, 1024), (0x01, 4096), (0x02, 512), (0x03, 512), (0x04, 4096), (0x05, 4096), (0x12, 1024)]
    {
        let whole = both.log(lid, 0, size + 64).unwrap();
        assert!(whole[size as usize..].iter().all(|&b| b == 0));
        assert_eq!(both.log(lid, size - 4, 4).unwrap(), whole[size as usize - 4..size as usize]);
        assert_eq!(both.log(lid, size, 4), Ok(vec![0; 4]));
        for offset in [size + 4, 2, 1 << 32] {
            assert_eq!(both.log(lid, offset, 4), Err(Status::INVALID_FIELD), "LID {lid:#x} offset {offset}");
        }
    }
    for lid in [0x0C, 0x70, 0x80, 0xC0] {
        assert_eq!(both.log(lid, 0, 4), Err(Status::INVALID_LOG_PAGE), "LID {lid:#x}");
    }
    let (mut discovery, _) = Both::discovery(1);
    for lid in [0x02, 0x03, 0x0C, 0xC0] {
        assert_eq!(discovery.log(lid, 0, 4), Err(Status::INVALID_LOG_PAGE), "LID {lid:#x}");
    }
    assert_eq!(discovery.log(lid::SUPPORTED, 0x70 * 4, 4), Ok(vec![1, 0, 0, 0]));
}

#[test]
fn smart_and_error_logs_show_what_happened() {
    let mut both = Both::io();
    both.shared.counters.read_bytes.store(512_001, Ordering::Relaxed);
    both.shared.counters.write_commands.store(3, Ordering::Relaxed);
    let before = u64::from_le_bytes(both.log(lid::SMART, 176, 8).unwrap().try_into().unwrap());
    let refused = both.feature(admin::GET_FEATURES, 0xEE, 0);
    assert_eq!(refused.status.code(), Status::INVALID_FIELD);
    let smart = both.log(lid::SMART, 0, 512).unwrap();
    assert_eq!((smart[32], smart[80]), (2, 3));
    assert_eq!(u64::from_le_bytes(smart[176..184].try_into().unwrap()), before + 1);
    let entry = both.log(lid::ERROR, 0, 64).unwrap();
    assert_eq!(u64::from_le_bytes(entry[..8].try_into().unwrap()), before + 1);
    assert_eq!(u16::from_le_bytes([entry[12], entry[13]]) >> 1 & 0x7FF, 0x02);
    let mut of_one = Sqe::new(admin::GET_LOG_PAGE);
    of_one.set_namespace_id(NamespaceId(1));
    GetLogPage { lid: 2, retain_event: false, len_bytes: 512, offset: 0, offset_is_index: false }
        .encode_into(&mut of_one.0);
    assert_eq!(both.reads(of_one, 512), Err(Status::INVALID_FIELD), "SMART isn't kept by namespace");
}

/// There is no sensor, and no value that says so: zero would be read as -273 °C. What is given is room temperature, and the
/// host's thresholds hold for it as for any other.
#[test]
fn smart_gives_a_temperature_that_alarms_nobody() {
    let mut both = Both::io();
    let read = |both: &mut Both| {
        let smart = both.log(lid::SMART, 0, 512).unwrap();
        (smart[0], i32::from(u16::from_le_bytes([smart[1], smart[2]])) - 273)
    };
    assert_eq!(read(&mut both), (0, 25));
    for (threshold, warned) in [(298, true), (299, false), (200, true), (0xFFFF, false)] {
        assert_eq!(both.set(fid::TEMPERATURE_THRESHOLD, threshold).status.code(), Status::SUCCESS);
        assert_eq!(read(&mut both).0 != 0, warned, "over-temperature threshold {threshold} K");
    }
    for (threshold, warned) in [(298, true), (297, false)] {
        assert_eq!(both.set(fid::TEMPERATURE_THRESHOLD, threshold | 1 << 20).status.code(), Status::SUCCESS);
        assert_eq!(read(&mut both).0 != 0, warned, "under-temperature threshold {threshold} K");
    }
}

#[test]
fn features_keep_the_rules() {
    let mut both = Both::io();
    assert_eq!(both.get(fid::NUMBER_OF_QUEUES).dw0, 3 | 3 << 16);
    assert_eq!(both.set(fid::NUMBER_OF_QUEUES, 1 | 9 << 16).dw0, 1 | 1 << 16);
    assert_eq!(both.queue.controller().io_queues(), 2);
    assert_eq!(both.set(fid::NUMBER_OF_QUEUES, 63 | 63 << 16).dw0, 3 | 3 << 16);
    assert_eq!(both.set(fid::NUMBER_OF_QUEUES, 0xFFFF).status.code(), Status::INVALID_FIELD);
    both.shared.register_queue(Arc::new(QueueShared::new(QueueId(1), 2))).ok().unwrap();
    assert_eq!(both.set(fid::NUMBER_OF_QUEUES, 0).status.code(), Status::COMMAND_SEQUENCE_ERROR);

    assert_eq!(both.get(fid::VOLATILE_WRITE_CACHE).status.code(), Status::INVALID_FIELD, "there is none");
    assert_eq!(both.get(fid::KEEP_ALIVE_TIMER).dw0, 5000);
    assert!(both.set(fid::KEEP_ALIVE_TIMER, 9000).status.is_success());
    assert_eq!(both.get(fid::KEEP_ALIVE_TIMER).dw0, 9000);
    assert_eq!(both.feature(admin::GET_FEATURES, 0x100 | u32::from(fid::KEEP_ALIVE_TIMER), 0).dw0, 5000, "default");
    assert_eq!(both.feature(admin::GET_FEATURES, 0x300 | u32::from(fid::KEEP_ALIVE_TIMER), 0).dw0, 4, "changeable");
    assert_eq!(
        both.feature(admin::GET_FEATURES, 0x400 | u32::from(fid::KEEP_ALIVE_TIMER), 0).status.code(),
        Status::INVALID_FIELD
    );
    let save = 1 << 31 | u32::from(fid::KEEP_ALIVE_TIMER);
    assert_eq!(both.feature(admin::SET_FEATURES, save, 1).status.code(), Status::FEATURE_NOT_SAVEABLE);
    let mut on_one = Sqe::new(admin::SET_FEATURES);
    on_one.set_namespace_id(NamespaceId(1)).set_dword(10, u32::from(fid::ARBITRATION));
    assert_eq!(both.plain(on_one).status.code(), Status::FEATURE_NOT_NAMESPACE_SPECIFIC);
    for fid in [0x00, 0x08, 0x09, 0x10, 0x80, 0x82, 0x83, 0xC0] {
        assert_eq!(both.get(fid).status.code(), Status::INVALID_FIELD, "FID {fid:#x}");
        assert_eq!(both.set(fid, 0).status.code(), Status::INVALID_FIELD, "FID {fid:#x}");
    }
}

/// H70, as far as it stands without reservations: the host identifier is Connect's.
#[test]
fn h70_host_identifier_is_read_only() {
    let mut both = Both::io();
    let mut get = Sqe::new(admin::GET_FEATURES);
    get.set_dword(10, u32::from(fid::HOST_IDENTIFIER)).set_dword(11, 1);
    assert_eq!(both.reads(get, 16), Ok(vec![9; 16]));
    get.set_dword(11, 0);
    assert_eq!(both.reads(get, 16), Err(Status::INVALID_FIELD), "64 bits aren't enough over fabrics");
    let mut set = Sqe::new(admin::SET_FEATURES);
    set.set_dword(10, u32::from(fid::HOST_IDENTIFIER)).set_dword(11, 1);
    let done = both.run(set, HostData::ToController(IoBuf::heap(16)));
    assert_eq!(done.cqe.status.code(), Status::COMMAND_SEQUENCE_ERROR);
}

#[test]
fn a_write_cache_shows_and_stays() {
    let mut both = Both::new(Role::Io(Arc::new(Three(Mutex::new(true)))), 5000);
    let controller = IdentifyController::decode(both.identify(1, 0, 0).unwrap()[..].try_into().unwrap());
    assert_eq!(controller.vwc, 7);
    assert_eq!(both.get(fid::VOLATILE_WRITE_CACHE).dw0, 1);
    assert!(both.set(fid::VOLATILE_WRITE_CACHE, 1).status.is_success());
    assert_eq!(both.set(fid::VOLATILE_WRITE_CACHE, 0).status.code(), Status::FEATURE_NOT_CHANGEABLE);
}

#[test]
fn host_behavior_comes_with_data_and_is_kept() {
    let mut both = Both::io();
    let mut sqe = Sqe::new(admin::SET_FEATURES);
    sqe.set_dword(10, u32::from(fid::HOST_BEHAVIOR));
    let mut behavior = IoBuf::heap(512);
    behavior[0] = 1;
    assert!(both.run(sqe, HostData::ToController(behavior)).cqe.status.is_success());
    let mut get = Sqe::new(admin::GET_FEATURES);
    get.set_dword(10, u32::from(fid::HOST_BEHAVIOR));
    assert_eq!(both.reads(get, 512).unwrap()[..2], [1, 0]);
    let mut odd = IoBuf::heap(512);
    odd[100] = 1;
    assert_eq!(both.run(sqe, HostData::ToController(odd)).cqe.status.code(), Status::INVALID_FIELD);
    let short = both.run(sqe, HostData::ToController(IoBuf::heap(256)));
    assert_eq!(short.cqe.status.code(), Status::SGL_LENGTH_INVALID);
}

/// H55: exactly AERL + 1 requests are held; aborting one frees its slot.
#[test]
fn h55_event_requests_are_held_up_to_the_limit() {
    let mut both = Both::io();
    let cids: Vec<_> = (0..async_event::REQUEST_LIMIT).map(|_| both.request_event()).collect();
    assert_eq!(both.queue.held_requests(), 4);
    for _ in 0..20 {
        let refused = both.plain(Sqe::new(admin::ASYNC_EVENT_REQUEST));
        assert_eq!(refused.status.code(), Status::ASYNC_EVENT_LIMIT_EXCEEDED);
    }
    let mut abort = Sqe::new(admin::ABORT);
    abort.set_dword(10, u32::from(cids[2].0) << 16);
    assert_eq!(both.plain(abort).dw0 & 1, 0, "aborted");
    let aborted = both.done.pop().expect("the request ends");
    assert_eq!((aborted.cid, aborted.cqe.status.code()), (cids[2], Status::ABORT_REQUESTED));
    assert_eq!(both.plain(abort).dw0 & 1, 1, "only once");
    both.request_event();
    assert_eq!((both.queue.held_requests(), both.done.len()), (4, 0));
}

/// H52 and H178: a changed namespace is told once, with its list; told again only after the list was read.
#[test]
fn h52_namespace_changes_are_told() {
    let mut both = Both::io();
    both.set(fid::ASYNC_EVENT_CONFIG, AsyncEventConfig::NAMESPACE_ATTRIBUTE);
    let first = both.request_event();
    let second = both.request_event();
    both.queue.namespace_changed(3, both.now);
    both.queue.namespace_changed(1, both.now);
    both.pump();
    assert_eq!(both.done.len(), 1);
    let told = both.done.pop().unwrap();
    assert_eq!((told.cid, AsyncEvent::decode(told.cqe.dw0)), (first, AsyncEvent::NAMESPACE_ATTRIBUTE));
    let retained = both.log_retaining(lid::CHANGED_NAMESPACES, 0, 4096, true).unwrap();
    assert_eq!(decode_namespace_list(&retained), [1, 3]);
    both.queue.namespace_changed(1024, both.now);
    both.pump();
    assert!(both.done.is_empty(), "the event was retained");
    assert_eq!(decode_namespace_list(&both.log(lid::CHANGED_NAMESPACES, 0, 4096).unwrap()), [1, 3, 1024]);
    assert_eq!(decode_namespace_list(&both.log(lid::CHANGED_NAMESPACES, 0, 4096).unwrap()), [] as [u32; 0]);
    both.queue.namespace_changed(3, both.now);
    both.pump();
    assert_eq!(both.done.pop().map(|c| c.cid), Some(second));
}

/// H39: the discovery log is the same in one piece and in pieces of any size, beyond 4 KiB too.
#[test]
fn h39_the_discovery_log_is_the_same_in_pieces() {
    let (mut both, _) = Both::discovery(40);
    let whole = both.log(lid::DISCOVERY, 0, 81 * 1024).unwrap();
    assert_eq!(&whole[..16], &[5, 0, 0, 0, 0, 0, 0, 0, 80, 0, 0, 0, 0, 0, 0, 0]);
    for piece in [512, 1024, 4096, 16384] {
        let pieces = (0..81 * 1024u64).step_by(piece).flat_map(|at| {
            let len = (81 * 1024 - at).min(piece as u64);
            both.log_retaining(lid::DISCOVERY, at, len, true).unwrap()
        });
        assert!(pieces.eq(whole.iter().copied()), "in pieces of {piece}");
    }
}

/// H27: Keep Alive works on a discovery controller, and keeps it.
#[test]
fn h27_a_discovery_controller_knows_keep_alive() {
    let (mut both, log) = Both::discovery(1);
    for _ in 0..60 {
        both.now += Duration::from_secs(100);
        assert!(both.plain(Sqe::new(admin::KEEP_ALIVE)).status.is_success());
        both.queue.tick(both.now);
        assert!(!both.queue.has_expired());
    }
    both.set(fid::ASYNC_EVENT_CONFIG, AsyncEventConfig::DISCOVERY_LOG_CHANGE);
    both.request_event();
    log.0.lock().unwrap().generation += 1;
    both.queue.discovery_log_changed(both.now);
    both.pump();
    let told = both.done.pop().expect("told");
    assert_eq!(AsyncEvent::decode(told.cqe.dw0), AsyncEvent::DISCOVERY_LOG_CHANGE);
    let controller = both.identify(1, 0, 0).unwrap();
    assert_eq!(controller[111], 2, "a discovery controller");
    assert_eq!(both.identify(2, 0, 0), Err(Status::INVALID_FIELD));
    both.now += Duration::from_secs(121);
    both.queue.tick(both.now);
    both.now += Duration::from_secs(121);
    both.queue.tick(both.now);
    assert!(both.queue.has_expired(), "silence beyond the documented limit");
}

/// H25: commands on any queue count as life; silence for the whole timeout doesn't.
#[test]
fn h25_traffic_keeps_the_association() {
    let mut both = Both::io();
    for _ in 0..20 {
        both.now += Duration::from_secs(5);
        both.shared.note_traffic();
        both.queue.take_life_sign();
        both.queue.tick(both.now);
        assert!(!both.queue.has_expired());
    }
    both.now += Duration::from_secs(6);
    both.queue.tick(both.now);
    assert!(both.queue.has_expired());
}

#[test]
fn shutdown_and_reset_wait_for_the_queues() {
    let mut both = Both::io();
    both.request_event();
    let cc = u64::from(Configuration::ENABLED.0);
    both.set_property(properties::CC, cc | 1 << 14);
    assert_eq!(both.queue.poll_errand(), Some(Errand::DrainAndFlush));
    assert_eq!(both.property(properties::CSTS, false).dw0, 1 | 1 << 2);
    assert_eq!(both.shared.state(), ControllerState::ShuttingDown);
    both.queue.stopped(true);
    assert_eq!(both.property(properties::CSTS, false).dw0, 1 | 2 << 2);
    both.set_property(properties::CC, 0);
    assert_eq!(both.queue.poll_errand(), Some(Errand::StopQueues));
    assert_eq!(both.queue.held_requests(), 0);
    both.queue.stopped(true);
    assert_eq!(both.property(properties::CSTS, false).dw0, 0);
    both.set_property(properties::CC, cc);
    assert_eq!(both.shared.state(), ControllerState::Ready);
    assert!(both.identify(1, 0, 0).is_ok());
}

#[test]
fn a_shutdown_that_could_not_flush_is_not_complete() {
    let mut both = Both::io();
    both.set_property(properties::CC, u64::from(Configuration::ENABLED.0) | 1 << 14);
    both.queue.stopped(false);
    assert_eq!(both.property(properties::CSTS, false).dw0, 1 | 1 << 1 | 1 << 2, "fatal, and still occurring");
}

#[test]
fn commands_of_other_kinds_are_refused() {
    let mut both = Both::io();
    for opcode in [0x00, 0x01, 0x04, 0x05, admin::NAMESPACE_MANAGEMENT, admin::FIRMWARE_COMMIT, admin::FORMAT_NVM, 0xC0]
    {
        assert_eq!(both.plain(Sqe::new(opcode)).status, Status::INVALID_OPCODE.dnr(), "opcode {opcode:#x}");
    }
}

/// One answer's data at a time, however many commands a host sends without reading (memory is bounded).
#[test]
fn a_host_that_does_not_read_gets_one_answer_at_a_time() {
    let (mut both, _) = Both::discovery(40);
    for _ in 0..20 {
        let mut sqe = Sqe::new(admin::GET_LOG_PAGE);
        let get = GetLogPage { lid: 0x70, retain_event: true, len_bytes: 1 << 20, offset: 0, offset_is_index: false };
        get.encode_into(&mut sqe.0);
        both.host.submit(sqe, HostData::FromController(IoBuf::heap(1 << 20)), 0).unwrap();
    }
    let up = gathered!(both.host);
    both.host.sent(up.len());
    let into = both.queue.receive_slice();
    into[..up.len()].copy_from_slice(&up);
    both.queue.received(up.len(), both.now);
    let waiting: usize = gathered!(both.queue).len();
    assert!((1 << 20..2 << 20).contains(&waiting), "{waiting} bytes wait");
    both.pump();
    assert_eq!(both.done.len(), 20);
}

/// Seeded noise: whatever a host's commands say, each gets one answer that fits its buffer, or is held.
#[test]
fn random_commands_are_answered_once_and_in_bounds() {
    let mut seed = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let opcodes = [0x00, 0x02, 0x06, 0x08, 0x09, 0x0A, 0x0C, 0x18, 0x7F, 0x80];
    for discovery in [false, true] {
        let mut both = if discovery { Both::discovery(3).0 } else { Both::io() };
        let mut held = 0;
        for round in 0..20_000u64 {
            let mut sqe = Sqe([0; 64]);
            sqe.0.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&next().to_le_bytes()));
            if next() % 4 != 0 {
                sqe.0[0] = opcodes[(next() % 10) as usize];
                // Small values reach further than wild ones.
                for byte in [4, 41, 44, 45, 46, 48, 49, 50, 51, 52, 53, 54, 55, 58] {
                    sqe.0[byte] = (next() % 3) as u8;
                }
                sqe.0[40] = (next() % 32) as u8;
                sqe.0[47] = 0;
            }
            let len_bytes = (next() % 8192) as u32;
            sqe.set_sgl(crate::wire::SglDescriptor::transport(len_bytes));
            let data = vec![next() as u8; (next() % 600) as usize];
            match both.queue.controller.command(&sqe, &data, both.now) {
                None => held += 1,
                Some(answer) => {
                    assert!(answer.data.len() <= len_bytes as usize, "round {round}: {sqe:?}");
                    assert!(answer.status.is_success() || answer.data.is_empty());
                }
            }
            while let Some(action) = both.queue.controller.poll_action() {
                held -= usize::from(matches!(action, Action::Complete(..)));
                if matches!(action, Action::StopQueues) {
                    held = 0;
                }
            }
            assert!(held <= async_event::REQUEST_LIMIT);
            if !both.queue.controller.properties.ready() {
                both.queue.controller.stopped(true);
                both.set_property(properties::CC, 0);
                both.set_property(properties::CC, u64::from(Configuration::ENABLED.0));
                while both.queue.controller.poll_action().is_some() {}
                held = 0;
            }
        }
    }
}
