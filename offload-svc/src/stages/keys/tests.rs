//! Keys: derivation, wrapping, key files, and that secrets don't show.

use std::os::unix::fs::PermissionsExt;

use hkdf::Hkdf;
use sha2::Sha256;
use zeroize::Zeroizing;

use super::*;
use crate::stages::cipher::Cipher;
use crate::stages::engines::Engines;

const LINEAGE: LineageId = LineageId(0xA1B2_C3D4);

fn kek(byte: u8) -> KeyEncryptionKey {
    KeyEncryptionKey::from_secret(Zeroizing::new([byte; KEK_BYTES]))
}

/// RFC 5869 appendix A.1 and A.2: the HKDF beneath our subkeys is the standard one.
#[test]
fn rfc_5869_vectors() {
    let ikm = [0x0b; 22];
    let salt: Vec<u8> = (0..=0x0c).collect();
    let info: Vec<u8> = (0xf0..=0xf9).collect();
    let mut okm = [0u8; 42];
    Hkdf::<Sha256>::new(Some(&salt), &ikm).expand(&info, &mut okm).unwrap();
    let expected = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865";
    assert_eq!(okm.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), expected);
    let range = |from: u8, to: u8| (from..=to).collect::<Vec<u8>>();
    let mut okm = [0u8; 82];
    Hkdf::<Sha256>::new(Some(&range(0x60, 0xaf)), &range(0, 0x4f)).expand(&range(0xb0, 0xff), &mut okm).unwrap();
    let expected = "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09\
                    da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87";
    assert_eq!(okm.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), expected);
}

#[test]
fn wrapped_keys_open_as_themselves_only() {
    let kek = kek(1);
    let key = LineageKey::generate(LINEAGE, KeyEpoch(7), Cipher::Aes128Xts).unwrap();
    let wrapped = key.wrap(&kek).unwrap();
    let opened = kek.unwrap(&WrappedKey::from_bytes(wrapped.as_bytes()).unwrap()).unwrap();
    assert_eq!((opened.lineage(), opened.epoch(), opened.cipher()), (LINEAGE, KeyEpoch(7), Cipher::Aes128Xts));
    assert_eq!(opened.secret(), key.secret());
    assert_ne!(key.wrap(&kek).unwrap(), wrapped, "every wrap takes a nonce of its own");
    for bit in 0..8 * WRAPPED_KEY_BYTES {
        let mut bytes = *wrapped.as_bytes();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let outcome = WrappedKey::from_bytes(&bytes).and_then(|wrapped| kek.unwrap(&wrapped));
        let error = outcome.expect_err("a changed wrapped key must not open");
        match bit / 8 {
            0..4 => assert_eq!(error, UnwrapError::UnknownFormat),
            4..12 => assert!(matches!(error, UnwrapError::OtherKek { .. })),
            _ => assert_eq!(error, UnwrapError::Damaged),
        }
    }
}

/// H115: after rotating the key-encryption key, the old one does not open the new wrapped form, nor the new one the old;
/// and the wrapped bytes have nothing in common by which one would lead to the other.
#[test]
fn h115_rotating_the_kek_parts_old_and_new_wraps() {
    let (old, new) = (kek(1), kek(2));
    let key = LineageKey::generate(LINEAGE, KeyEpoch(0), Cipher::Aes256Gcm).unwrap();
    let before = key.wrap(&old).unwrap();
    let after = old.unwrap(&before).unwrap().wrap(&new).unwrap();
    assert_eq!(new.unwrap(&after).unwrap().secret(), key.secret());
    let refused = UnwrapError::OtherKek { needed: new.id(), given: old.id() };
    assert_eq!(old.unwrap(&after).unwrap_err(), refused);
    // Even with the name of the key forged, the tag holds.
    let mut forged = *after.as_bytes();
    forged[4..12].copy_from_slice(&old.id().0);
    assert_eq!(old.unwrap(&WrappedKey::from_bytes(&forged).unwrap()).unwrap_err(), UnwrapError::Damaged);
    assert!(before.as_bytes()[36..].windows(16).all(|piece| !after.as_bytes().windows(16).any(|other| other == piece)));
}

#[test]
fn wraps_are_pinned_for_golden_images() {
    let key = LineageKey::from_secret(LINEAGE, KeyEpoch(3), Cipher::Aes256Gcm, Zeroizing::new([9; 32]));
    let wrapped = key.wrap_with_nonce(&kek(5), [6; 12]);
    assert_eq!(wrapped, key.wrap_with_nonce(&kek(5), [6; 12]));
    assert_eq!(&wrapped.as_bytes()[..4], b"SLK1");
    assert_eq!(wrapped.lineage(), LINEAGE);
    assert_eq!(wrapped.epoch(), KeyEpoch(3));
    assert_eq!(wrapped.kek_id(), kek(5).id());
    assert_eq!(crate::stages::crc::crc32c(wrapped.as_bytes()), GOLDEN_WRAP_CRC);
}

const GOLDEN_WRAP_CRC: u32 = 1_102_085_126;

#[test]
fn subkeys_differ_by_everything_that_goes_in() {
    let engines = Engines::portable();
    let tag = |lineage, epoch, secret, cipher, salt| {
        let key = LineageKey::from_secret(lineage, epoch, cipher, Zeroizing::new([secret; 32]));
        match Subkey::derive(&key, Salt([salt; 16]), &engines) {
            Subkey::Gcm(key) => key.seal(&[0; 12], &[], &mut []).unwrap(),
            Subkey::Xts(key) => {
                let mut block = [0u8; 16];
                key.encrypt(0, &mut block).unwrap();
                block
            }
        }
    };
    let base = (LINEAGE, KeyEpoch(1), 1, Cipher::Aes256Gcm, 1);
    let mut tags = vec![
        tag(base.0, base.1, base.2, base.3, base.4),
        tag(LineageId(1), base.1, base.2, base.3, base.4),
        tag(base.0, KeyEpoch(2), base.2, base.3, base.4),
        tag(base.0, base.1, 2, base.3, base.4),
        tag(base.0, base.1, base.2, base.3, 2),
    ];
    tags.extend(Cipher::ALL[1..].iter().map(|&cipher| tag(base.0, base.1, base.2, cipher, base.4)));
    assert_eq!(tags[0], tag(base.0, base.1, base.2, base.3, base.4));
    let count = tags.len();
    tags.sort();
    tags.dedup();
    assert_eq!(tags.len(), count);
}

#[test]
fn nonces_count_and_salts_are_fresh() {
    let key = LineageKey::generate(LINEAGE, KeyEpoch(0), Cipher::Aes256Gcm).unwrap();
    let mut sealing = key.sealing_key(Salt::random().unwrap(), &Engines::portable());
    assert_eq!((0..5).map(|_| sealing.take_nonce().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    let salts: std::collections::HashSet<Salt> = (0..1000).map(|_| Salt::random().unwrap()).collect();
    assert_eq!(salts.len(), 1000);
}

#[test]
fn a_forgotten_lineage_opens_no_more_though_its_subkey_was_cached() {
    let engines = Engines::portable();
    let ring = Keyring::new();
    ring.insert(LineageKey::generate(LINEAGE, KeyEpoch(0), Cipher::Aes256Gcm).unwrap());
    ring.insert(LineageKey::generate(LineageId(2), KeyEpoch(0), Cipher::Aes256Gcm).unwrap());
    let mut opening = OpeningKeys::default();
    let mut open =
        |lineage| opening.subkey(&ring, (lineage, KeyEpoch(0), Salt([0; 16])), Cipher::Aes256Gcm, &engines).map(|_| ());
    assert!(open(LINEAGE).is_ok());
    assert!(open(LineageId(2)).is_ok());
    ring.forget(LINEAGE);
    assert_eq!(open(LINEAGE), Err(NoSubkey::NoKey { lineage: LINEAGE, epoch: KeyEpoch(0) }));
    assert!(open(LineageId(2)).is_ok());
    assert!(ring.get(LINEAGE, KeyEpoch(0)).is_none());
}

#[test]
fn the_cache_of_subkeys_is_bounded() {
    let engines = Engines::portable();
    let ring = Keyring::new();
    ring.insert(LineageKey::generate(LINEAGE, KeyEpoch(0), Cipher::Aes256Gcm).unwrap());
    let mut opening = OpeningKeys::default();
    for mount in 0..3000u128 {
        let wanted = (LINEAGE, KeyEpoch(0), Salt(mount.to_le_bytes()));
        assert!(opening.subkey(&ring, wanted, Cipher::Aes256Gcm, &engines).is_ok());
    }
    assert!(opening.len() <= 1024);
}

/// In a process of its own: the switches are for good.
#[test]
fn a_protected_process_is_not_dumpable() {
    const CHILD: &str = "SLUICE_TEST_PROTECTED_CHILD";
    if std::env::var_os(CHILD).is_some() {
        protect_process().unwrap();
        assert!(!nix::sys::prctl::get_dumpable().unwrap());
        let limits = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_CORE).unwrap();
        assert_eq!(limits, (0, 0));
        return;
    }
    let (_, module) = module_path!().split_once("::").unwrap();
    let name = format!("{module}::a_protected_process_is_not_dumpable");
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", &name]).env(CHILD, "1").output().unwrap();
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "the child found no such test");
}

fn file(path: std::path::PathBuf, create: bool) -> KekSource {
    KekSource::File { path, create }
}

#[test]
fn a_key_file_is_made_once_private_and_complete() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pool.key");
    assert!(matches!(KeyEncryptionKey::load(&file(path.clone(), false)), Err(KekError::Missing { .. })));
    assert!(!path.exists());
    let made = KeyEncryptionKey::load(&file(path.clone(), true)).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    assert_eq!(std::fs::read(&path).unwrap().len(), 65);
    for create in [true, false] {
        let again = KeyEncryptionKey::load(&file(path.clone(), create)).unwrap();
        assert_eq!(again.secret(), made.secret());
    }
    let left: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["pool.key"]);
}

#[test]
fn two_services_that_start_at_once_agree_on_one_key() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pool.key");
    // The loser of the race finds the name taken, as here.
    std::fs::write(&path, "ab".repeat(32)).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    let key = kek::create_key(&path).unwrap();
    assert_eq!(key.secret(), &[0xab; 32]);
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1);
}

#[test]
fn key_files_that_others_can_read_are_refused_with_the_cure() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pool.key");
    std::fs::write(&path, format!("{}\n", "5a".repeat(32))).unwrap();
    for mode in [0o640, 0o604, 0o620, 0o602, 0o610, 0o666, 0o601] {
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        let error = KeyEncryptionKey::load(&file(path.clone(), true)).unwrap_err();
        assert!(matches!(error, KekError::ReadableByOthers { mode: found, .. } if found == mode), "{error}");
        assert!(error.to_string().contains(&format!("chmod 600 {}", path.display())), "{error}");
    }
    for mode in [0o600, 0o400] {
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        assert_eq!(KeyEncryptionKey::load(&file(path.clone(), false)).unwrap().secret(), &[0x5a; 32]);
    }
}

#[test]
fn malformed_key_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pool.key");
    for text in ["", "\n", &"5a".repeat(31), &"5a".repeat(33), &"zz".repeat(32), &"+5".repeat(32), &"5a".repeat(4000)] {
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        let error = KeyEncryptionKey::load(&file(path.clone(), true)).unwrap_err();
        assert!(matches!(error, KekError::Malformed { .. }), "{text:.10}: {error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "what stood there stays");
    }
    let error = KeyEncryptionKey::load(&file(directory.path().to_owned(), true)).unwrap_err();
    assert!(matches!(error, KekError::NotAFile { .. }), "{error}");
    for name in ["", "a/b", "..", "."] {
        let error = KeyEncryptionKey::load(&KekSource::Credential { name: name.to_owned() }).unwrap_err();
        assert!(matches!(error, KekError::CredentialName { .. }), "{error}");
    }
}

#[test]
fn debug_and_errors_show_no_secret() {
    let kek = kek(0xC7);
    let key = LineageKey::from_secret(LINEAGE, KeyEpoch(1), Cipher::Aes128Xts, Zeroizing::new([0xC7; 32]));
    let sealing = key.sealing_key(Salt([1; 16]), &Engines::portable());
    let ring = Keyring::new();
    ring.insert(LineageKey::from_secret(LINEAGE, KeyEpoch(1), Cipher::Aes128Xts, Zeroizing::new([0xC7; 32])));
    let shown = format!("{kek:?} {key:?} {sealing:?} {ring:?} {:?}", key.wrap(&kek).unwrap());
    for secret in ["c7c7", "C7C7", "199, 199"] {
        assert!(!shown.contains(secret), "{shown}");
    }
}
