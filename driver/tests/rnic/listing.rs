//! The attributes of devices.

use ferroce_driver::Error;
use ferroce_driver::rnic::{Rnic, RnicGidKind, Verbs};
use ferroce_driver_test_support::rnic_stub::{FUNCTIONS, Stub, setting};

fn rnics(stub: &Stub) -> Result<Vec<Rnic>, Error> {
    Verbs::load_from(stub.path())?.rnics()
}

#[test]
fn devices_report_their_attributes() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let rnics = rnics(&stub).unwrap();
    assert_eq!(rnics.iter().map(|rnic| rnic.name.as_str()).collect::<Vec<_>>(), ["stub0", "stub1"]);
    for (number, rnic) in (2..).zip(rnics) {
        let details = rnic.details.unwrap();
        assert_eq!((details.firmware.as_str(), details.vendor, details.part), ("16.35.2000", 0x02c9, 4119));
        assert_eq!((details.limits.max_qp, details.limits.max_qp_wr), (131_072, 32_768));
        let [first, second] = &details.ports[..] else { panic!("two ports: {details:?}") };
        assert_eq!((first.number, first.is_active, second.number, second.is_active), (1, true, 2, false));
        assert!(first.is_ethernet && first.path_mtu == Some(4096));
        let kinds: Vec<_> = first.gids.iter().map(|gid| (gid.index, gid.kind, gid.interface)).collect();
        assert_eq!(kinds, [(0, RnicGidKind::RoceV1, Some(1)), (1, RnicGidKind::RoceV2, Some(1))]);
        assert_eq!(first.gids[1].gid[10..], [0xff, 0xff, 10, 0, 0, number]);
        assert_eq!(first.pkeys, [0xffff]);
        assert!(details.limits.has_atomics && details.limits.has_windows_2b, "{:?}", details.limits);
        assert!(second.gids.is_empty());
    }
}

#[test]
fn no_library_and_no_devices_are_distinguished() {
    let error = Verbs::load_from("/nonexistent/libibverbs.so.1").unwrap_err().to_string();
    assert!(error.starts_with("/nonexistent/libibverbs.so.1 can't be loaded: "), "{error}");
    for wrong in ["NO_DEVICES", "NO_KERNEL"] {
        let Some(stub) = Stub::build(&[wrong]) else { return };
        assert_eq!(rnics(&stub).unwrap().len(), 0, "{wrong}");
    }
    // The system's library, if there is one.
    match Verbs::load() {
        Ok(verbs) => println!("libibverbs.so.1 of the system: {:?}", verbs.rnics()),
        Err(error) => assert!(matches!(error, Error::NoVerbs { .. }), "{error}"),
    }
}

#[test]
fn the_missing_function_of_an_old_library_is_named() {
    for function in FUNCTIONS {
        let Some(stub) = Stub::build(&[&setting("MISSING", function)]) else { return };
        let error = rnics(&stub).unwrap_err().to_string();
        assert!(error.contains(&format!("no function {function}; rdma-core 33")), "{error}");
    }
}

#[test]
fn each_function_may_fail() {
    let Some(stub) = Stub::build(&["FAIL_GET_DEVICE_LIST"]) else { return };
    let error = rnics(&stub).unwrap_err().to_string();
    assert!(error.starts_with("ibv_get_device_list: Operation not permitted"), "{error}");
    for (wrong, expected) in [
        ("FAIL_OPEN_DEVICE", "ibv_open_device of stub0: Permission denied"),
        ("FAIL_QUERY_DEVICE", "ibv_query_device of stub0: Input/output error"),
        ("FAIL_QUERY_PORT", "ibv_query_port of stub0: No such device"),
        ("FAIL_QUERY_GID_TABLE", "ibv_query_gid_table of stub0: Operation not supported"),
    ] {
        let Some(stub) = Stub::build(&[wrong]) else { return };
        let rnics = rnics(&stub).unwrap();
        let error = rnics[0].details.as_ref().unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
        // A device that can't be opened does not affect the others.
        assert_eq!(rnics[1].details.is_ok(), wrong == "FAIL_OPEN_DEVICE", "{:?}", rnics[1]);
    }
    let Some(stub) = Stub::build(&["FAIL_CLOSE_DEVICE"]) else { return };
    assert!(rnics(&stub).unwrap().iter().all(|rnic| rnic.details.is_ok()));
}

/// Counts and lengths that are invalid are accepted up to the limits.
#[test]
fn invalid_counts_are_limited() {
    let Some(stub) = Stub::build(&["GARBAGE"]) else { return };
    let rnics = rnics(&stub).unwrap();
    assert_eq!(rnics.len(), 2);
    for rnic in rnics {
        assert_eq!(rnic.name, "x".repeat(64));
        let error = rnic.details.unwrap_err().to_string();
        assert!(error.contains("it reports 1099511627776 rows: must be at most 0"), "{error}");
    }
}
