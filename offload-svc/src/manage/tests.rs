use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::watch;

use super::client::{Client, ClientError};
use super::request::*;
use super::server::{BindError, LARGE_BODIES, Socket, serve};
use super::*;

/// Answers every read, counts every change, and never ends a namespace removal.
#[derive(Default)]
struct Fake {
    changes: AtomicU64,
}

impl Fake {
    fn change(&self) -> BoxFuture<'static, Result<(), Refusal>> {
        self.changes.fetch_add(1, Ordering::SeqCst);
        async { Ok(()) }.boxed()
    }
}

impl Control for Fake {
    fn status(&self) -> view::Status {
        view::Status { uptime_ms: u64::MAX, waits_for: "member 3".into(), ..Default::default() }
    }
    fn pool(&self) -> Result<view::Pool, Refusal> {
        Err(Refusal::new(RefusalKind::NotFound, "there is no pool"))
    }
    fn volumes(&self) -> Result<Vec<view::Volume>, Refusal> {
        let volume =
            |i: u64| view::Volume { name: format!("volume-{i}"), size_bytes: (1 << 53) + 1, ..Default::default() };
        Ok((0..1000).map(volume).collect())
    }
    fn subsystems(&self) -> Vec<view::Subsystem> {
        Vec::new()
    }
    fn listeners(&self) -> Vec<view::Listener> {
        Vec::new()
    }
    fn config(&self) -> view::Configuration {
        view::Configuration::default()
    }
    fn metrics(&self) -> String {
        metrics::render(metrics::Snapshot::default())
    }
    fn create_volume(&self, request: VolumeRequest) -> BoxFuture<'static, Result<view::Volume, Refusal>> {
        let size_bytes = request.size.bytes();
        self.change().map(move |_| Ok(view::Volume { size_bytes, ..Default::default() })).boxed()
    }
    fn delete_volume(&self, _: VolumeRemoval) -> BoxFuture<'static, Result<view::Receipt, Refusal>> {
        self.change().map(|_| Ok(view::Receipt::default())).boxed()
    }
    fn receipts(&self) -> Result<Vec<view::Receipt>, Refusal> {
        Ok(Vec::new())
    }
    fn member_destroyed(&self, _: MemberDestroyed) -> BoxFuture<'static, Result<Vec<view::Receipt>, Refusal>> {
        self.change().map(|_| Ok(Vec::new())).boxed()
    }
    fn resize_volume(&self, _: VolumeResize) -> BoxFuture<'static, Result<view::Volume, Refusal>> {
        async { Err(Refusal::new(RefusalKind::NoSpace, "size: 2GiB: no space")) }.boxed()
    }
    fn snapshot_volume(&self, _: SnapshotRequest) -> BoxFuture<'static, Result<view::Volume, Refusal>> {
        self.change().map(|_| Ok(view::Volume::default())).boxed()
    }
    fn clone_volume(&self, _: CloneRequest) -> BoxFuture<'static, Result<view::Volume, Refusal>> {
        self.change().map(|_| Ok(view::Volume::default())).boxed()
    }
    fn keys(&self) -> Result<Vec<view::VolumeKey>, Refusal> {
        Ok(Vec::new())
    }
    fn rotate_key(&self, _: KeyRotation) -> BoxFuture<'static, Result<view::VolumeKey, Refusal>> {
        self.change().map(|_| Ok(view::VolumeKey::default())).boxed()
    }
    fn replace_member(&self, _: MemberReplacement) -> BoxFuture<'static, Result<view::Coming, Refusal>> {
        self.change().map(|_| Ok(view::Coming::default())).boxed()
    }
    fn attach_member(&self, _: MemberReturn) -> BoxFuture<'static, Result<view::Coming, Refusal>> {
        async { Err(Refusal::new(RefusalKind::Conflict, "member 3 is in the set already")) }.boxed()
    }
    fn scrub(&self, _: ScrubRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        self.change()
    }
    fn add_subsystem(&self, _: SubsystemRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        self.change()
    }
    fn remove_subsystem(&self, _: SubsystemRemoval) -> BoxFuture<'static, Result<(), Refusal>> {
        self.change()
    }
    fn add_namespace(&self, _: NamespaceRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        async { panic!("a bug in the service") }.boxed()
    }
    fn remove_namespace(&self, _: NamespaceRemoval) -> BoxFuture<'static, Result<(), Refusal>> {
        futures::future::pending().boxed()
    }
    fn allow_host(&self, _: HostRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        self.change()
    }
    fn deny_host(&self, _: HostRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        self.change()
    }
    fn add_listener(&self, _: ListenerRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        self.change()
    }
    fn remove_listener(&self, _: ListenerRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        self.change()
    }
}

/// A served fake on a thread of its own.
struct Served {
    _folder: tempfile::TempDir,
    path: PathBuf,
    fake: Arc<Fake>,
    stop: watch::Sender<bool>,
    server: Option<std::thread::JoinHandle<()>>,
}

impl Served {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let fake = Arc::new(Fake::default());
        let (stop, stopped) = watch::channel(false);
        let (bound, wait) = std::sync::mpsc::channel();
        let (at, control) = (path.clone(), Arc::clone(&fake));
        let server = std::thread::spawn(move || {
            runtime().block_on(async move {
                let socket = Socket::bind(&at).unwrap();
                bound.send(()).unwrap();
                serve(socket, control, stopped).await;
            });
        });
        wait.recv().unwrap();
        Self { _folder: folder, path, fake, stop, server: Some(server) }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    /// What comes back for raw bytes, up to the end of the stream.
    fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        // The server may answer and close before it has read everything.
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        let ended = self.server.take().map(std::thread::JoinHandle::join);
        assert!(matches!(ended, Some(Ok(()))) || std::thread::panicking());
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
}

fn post(path: &str, body: &str) -> String {
    let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json");
    format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

#[test]
fn the_client_gets_answers_and_refusals() {
    let served = Served::start();
    let client = Client::new(&served.path);
    runtime().block_on(async {
        let status: view::Status = serde_json::from_slice(&client.get("/v1/status").await.unwrap()).unwrap();
        assert_eq!(status.uptime_ms, u64::MAX, "numbers are exact");
        assert!(
            matches!(client.get("/v1/pool").await, Err(ClientError::Refused(r)) if r.kind == RefusalKind::NotFound)
        );
        let nowhere = client.get("/v2/status").await.unwrap_err();
        assert_eq!(nowhere.to_string(), "no such path in the management API");
        let resize = VolumeResize { name: "v".parse().unwrap(), size: "2GiB".parse().unwrap() };
        let refused = client.post("/v1/volume/resize", &resize).await.unwrap_err();
        assert_eq!(refused.to_string(), "size: 2GiB: no space");
        let namespace = NamespaceRequest {
            nqn: "nqn.2026-11.io.example:a".parse().unwrap(),
            nsid: 1,
            backend: "mem:1MiB".parse().unwrap(),
            block_size: None,
        };
        let panicked = client.post("/v1/namespace/add", &namespace).await;
        assert!(matches!(panicked, Err(ClientError::Refused(r)) if r.kind == RefusalKind::Internal));
        client.get("/v1/status").await.expect("a panic in one call leaves the server up");
        let absent = Client::new(&served.path.with_extension("x")).get("/v1/status").await.unwrap_err().to_string();
        assert!(absent.contains("control.x: ") && absent.contains("is offload-svc running?"), "{absent}");
    });
}

#[test]
fn the_socket_is_private_and_taken_once() {
    let served = Served::start();
    let mode = std::fs::metadata(&served.path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let _entered = runtime();
    let _guard = _entered.enter();
    assert!(matches!(Socket::bind(&served.path), Err(BindError::InUse(_))));
    let stale = served.path.with_extension("stale");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    Socket::bind(&stale).expect("a socket that a crash left is replaced");
    std::fs::write(&stale, b"precious").unwrap();
    assert!(matches!(Socket::bind(&stale), Err(BindError::NotSocket(_))));
    assert_eq!(std::fs::read(&stale).unwrap(), b"precious");
}

#[test]
fn h155_oversized_and_hostile_bodies_are_refused_with_the_limit() {
    let served = Served::start();
    let huge = format!("{{\"name\":\"{}\"", "x".repeat(10 << 20));
    assert!(served.raw(post("/v1/volume/create", &huge).as_bytes()).starts_with("HTTP/1.1 413"));
    let deep = "[".repeat(10_000);
    let answer = served.raw(post("/v1/volume/create", &deep).as_bytes());
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    let head = format!("GET /v1/status HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(1 << 20));
    assert!(!served.raw(head.as_bytes()).contains("200 OK"));
    for (size, exact) in [("9007199254740993", 9007199254740993u64), ("\"2TiB\"", 2 << 40)] {
        let body = format!("{{\"name\":\"v\",\"size\":{size}}}");
        let answer = served.raw(post("/v1/volume/create", &body).as_bytes());
        assert!(answer.contains(&format!("\"size_bytes\":{exact},")), "{answer}");
    }
    let hosts: Vec<String> = (0..1000).map(|i| format!("\"nqn.2026-11.io.example:host-{i}\"")).collect();
    let body = format!("{{\"nqn\":\"nqn.2026-11.io.example:a\",\"hosts\":[{}]}}", hosts.join(","));
    assert!(served.raw(post("/v1/subsystem/add", &body).as_bytes()).starts_with("HTTP/1.1 200"));
    assert!(served.raw(get("/v1/volumes").as_bytes()).matches("9007199254740993").count() == 1000);
}

/// Large bodies take turns: more of them than may be read at a time, none complete, keep neither small ones from being answered
/// nor each other from being told.
#[test]
fn h155_large_bodies_take_turns_and_small_ones_do_not_wait() {
    let served = Served::start();
    let large = post("/v1/volume/create", &format!("{{\"name\":\"{}\"", "x".repeat(900 << 10)));
    let mut stalled: Vec<UnixStream> = (0..LARGE_BODIES + 2)
        .map(|_| {
            let mut stream = served.connect();
            stream.write_all(&large.as_bytes()[..32 << 10]).unwrap();
            stream
        })
        .collect();
    let answer = served.raw(post("/v1/volume/create", "{\"name\":\"v\",\"size\":4096}").as_bytes());
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    for stream in &mut stalled {
        let mut end = Vec::new();
        // Told, or cut with what it had sent unread.
        let _ = stream.read_to_end(&mut end);
        assert!(end.is_empty() || end.starts_with(b"HTTP/1.1 400"), "{}", String::from_utf8_lossy(&end));
    }
    // Complete ones are all served, however many come at once.
    let hosts: Vec<String> = (0..1000).map(|i| format!("\"nqn.2026-11.io.example:host-{i}\"")).collect();
    let body = format!("{{\"nqn\":\"nqn.2026-11.io.example:a\",\"hosts\":[{}]}}", hosts.join(","));
    let whole = post("/v1/subsystem/add", &body);
    std::thread::scope(|scope| {
        for _ in 0..4 * LARGE_BODIES {
            scope.spawn(|| assert!(served.raw(whole.as_bytes()).starts_with("HTTP/1.1 200")));
        }
    });
    assert_eq!(served.fake.changes.load(Ordering::SeqCst), 1 + 4 * LARGE_BODIES as u64);
}

#[test]
fn h153_names_in_requests_obey_the_rules_of_the_configuration() {
    let served = Served::start();
    for (body, says) in [
        ("{\"name\":\"a b\",\"size\":4096}", "holds ' ' at byte 1"),
        ("{\"name\":\"v\",\"size\":\"2GB\"}", "GB is ambiguous"),
        ("{\"name\":\"v\",\"size\":4096,\"colour\":1}", "unknown field `colour`"),
        ("{\"name\":\"v\"}", "missing field `size`"),
    ] {
        let answer = served.raw(post("/v1/volume/create", body).as_bytes());
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains(says), "{answer}");
    }
    assert_eq!(served.fake.changes.load(Ordering::SeqCst), 0, "nothing half made");
}

#[test]
fn h156_a_change_that_never_ends_is_answered_with_the_reason_and_blocks_nobody() {
    let served = Served::start();
    let body = "{\"nqn\":\"nqn.2026-11.io.example:a\",\"nsid\":1}";
    let mut stuck = served.connect();
    stuck.write_all(post("/v1/namespace/remove", body).as_bytes()).unwrap();
    let began = Instant::now();
    for _ in 0..50 {
        assert!(served.raw(get("/v1/status").as_bytes()).starts_with("HTTP/1.1 200"));
    }
    assert!(began.elapsed() < CALL_LIMIT, "other calls don't wait for the stuck one");
    let mut answer = String::new();
    stuck.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 504") && answer.contains("waiting for member 3"), "{answer}");
}

#[test]
fn h141_stalled_and_rude_clients_do_not_disturb_the_others() {
    let served = Served::start();
    // Fewer than the connections allowed: those would wait in the backlog until these time out.
    let stalled: Vec<UnixStream> = (0..200)
        .map(|i| {
            let mut stream = served.connect();
            let whole = post("/v1/volume/create", "{\"name\":\"v\",\"size\":4096}");
            stream.write_all(&whole.as_bytes()[..whole.len() * (i % 10) / 10]).unwrap();
            stream
        })
        .collect();
    for _ in 0..100 {
        let mut rude = served.connect();
        rude.write_all(get("/v1/volumes").as_bytes()).unwrap();
        drop(rude); // in the middle of the answer
    }
    let pipelined = get("/v1/status").replace("connection: close\r\n", "").repeat(99) + &get("/v1/status");
    let answers = served.raw(pipelined.as_bytes());
    assert_eq!(answers.matches("HTTP/1.1 200 OK").count(), 100, "each request is answered once");
    assert_eq!(answers.matches("\"waits_for\":\"member 3\"").count(), 100, "and whole");
    assert_eq!(served.fake.changes.load(Ordering::SeqCst), 0, "half a request changes nothing");
    for mut stream in stalled {
        let mut end = Vec::new();
        // Cut, or told that it was too slow; never left hanging.
        let _ = stream.read_to_end(&mut end);
        assert!(end.is_empty() || end.starts_with(b"HTTP/1.1 4"), "{}", String::from_utf8_lossy(&end));
    }
}

#[test]
fn h141_a_stop_lets_answers_under_way_finish() {
    let served = Served::start();
    let mut stream = served.connect();
    stream.write_all(get("/v1/volumes").as_bytes()).unwrap();
    let mut first = [0; 12];
    stream.read_exact(&mut first).unwrap();
    served.stop.send(true).unwrap();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
    assert_eq!(rest.matches("9007199254740993").count(), 1000, "the whole answer");
    let path = served.path.clone();
    drop(served);
    assert!(!path.exists(), "the socket's file goes with it");
}
