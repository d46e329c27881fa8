//! The management API's server side.
//!
//! Owns the Unix socket, routes, limits and deadlines. Must not know what a call does. Invariant: a connection lives at most
//! `CONNECTION_LIMIT`, a head or body that doesn't come is given up, and every request is answered at most once, whole.

use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, FromRequest, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::future::BoxFuture;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use super::{CALL_LIMIT, Control, Refusal, RefusalKind};

/// Connections at one time; more wait in the socket's backlog.
pub const MAX_CONNECTIONS: usize = 1024;
/// A request's body: a list of a thousand hosts fits, a flood doesn't.
pub const MAX_BODY_BYTES: usize = 1 << 20;
/// A body of this length at most is read at once. Longer ones, which only lists of hosts need, take turns.
pub const SMALL_BODY_BYTES: usize = 16 << 10;
/// Longer ones that are read at a time.
pub const LARGE_BODIES: usize = 4;
/// A request's head, and each connection's buffer.
pub const MAX_HEAD_BYTES: usize = 16 << 10;
/// A head that isn't complete by then is given up: whoever asks sends it at once.
const HEAD_LIMIT: Duration = Duration::from_secs(2);
/// A body that isn't complete by then, the wait for its turn included, is given up.
const BODY_LIMIT: Duration = Duration::from_secs(5);
/// How long a connection may last, slow readers included.
const CONNECTION_LIMIT: Duration = Duration::from_secs(60);

/// Why the socket can't be served.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another process answers on it.
    #[error("{}: another service answers on this socket: stop it, or set service.socket to another path", .0.display())]
    InUse(PathBuf),
    /// Something else has that name.
    #[error("{}: exists and is no socket: remove it, or set service.socket to another path", .0.display())]
    NotSocket(PathBuf),
    /// The system refused.
    #[error("{}: {source}: check service.socket and the permissions of its folder", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A bound socket; its file goes when it is dropped, if it is still this one's.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the file.
    identity: (u64, u64),
}

impl Socket {
    /// Binds `path` with mode 0600. A socket file that nobody answers on is left from a crash and replaced.
    ///
    /// # Errors
    /// If the path is taken or the system refuses.
    pub fn bind(path: &Path) -> Result<Self, BindError> {
        let io = |source| BindError::Io { path: path.to_owned(), source };
        match std::fs::symlink_metadata(path) {
            Ok(found) => {
                use std::os::unix::fs::FileTypeExt;
                if !found.file_type().is_socket() {
                    return Err(BindError::NotSocket(path.to_owned()));
                }
                match std::os::unix::net::UnixStream::connect(path) {
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                        std::fs::remove_file(path).map_err(io)?;
                    }
                    _ => return Err(BindError::InUse(path.to_owned())),
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io(error)),
        }
        let std_listener = bind_private(path).map_err(io)?;
        std_listener.set_nonblocking(true).map_err(io)?;
        let listener = UnixListener::from_std(std_listener).map_err(io)?;
        let identity = identity(path).map_err(io)?;
        Ok(Self { listener, path: path.to_owned(), identity })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Binds under a name that nobody looks for, restricts it, and only then gives it its name: there is no moment in which
/// others could connect.
fn bind_private(path: &Path) -> io::Result<std::os::unix::net::UnixListener> {
    let mut hidden = path.as_os_str().to_owned();
    hidden.push(format!(".{}", std::process::id()));
    let hidden = PathBuf::from(hidden);
    let _ = std::fs::remove_file(&hidden);
    let listener = std::os::unix::net::UnixListener::bind(&hidden)?;
    let named = std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o600))
        .and_then(|()| std::fs::rename(&hidden, path));
    if let Err(error) = named {
        let _ = std::fs::remove_file(&hidden);
        return Err(error);
    }
    Ok(listener)
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let found = std::fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Another service may have taken the name meanwhile.
        if identity(&self.path).is_ok_and(|there| there == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Serves until `stop` turns true or its sender goes; then lets requests under way finish, within their deadlines.
pub async fn serve(socket: Socket, control: Arc<dyn Control>, mut stop: watch::Receiver<bool>) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let router = router(control);
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let accepted = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => break,
            accepted = accept(&socket.listener, &slots) => accepted,
        };
        let Some((stream, slot)) = accepted else { continue };
        let (router, stop) = (router.clone(), stop.clone());
        connections.spawn(async move {
            connection(stream, router, stop).await;
            drop(slot);
        });
    }
    drop(socket);
    let finish = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(CALL_LIMIT, finish).await.is_err() {
        tracing::warn!("management connections still open at the stop were cut");
    }
}

async fn accept(
    listener: &UnixListener,
    slots: &Arc<Semaphore>,
) -> Option<(UnixStream, tokio::sync::OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, slot)),
        Err(error) => {
            tracing::warn!(%error, "management socket: accept failed");
            // EMFILE stays until something is closed: don't spin on it.
            tokio::time::sleep(Duration::from_millis(100)).await;
            None
        }
    }
}

async fn connection(stream: UnixStream, router: Router, mut stop: watch::Receiver<bool>) {
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut served = std::pin::pin!(served);
    let until_stop = async {
        tokio::select! {
            result = served.as_mut() => return result,
            _ = stop.wait_for(|stop| *stop) => {}
        }
        served.as_mut().graceful_shutdown();
        served.as_mut().await
    };
    match tokio::time::timeout(CONNECTION_LIMIT, until_stop).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "management connection ended"),
        Err(_) => tracing::debug!("management connection cut after its time"),
    }
}

type Shared = Arc<dyn Control>;

fn router(control: Shared) -> Router {
    let turns = &Arc::new(Semaphore::new(LARGE_BODIES));
    Router::new()
        .route("/v1/status", get(|State(c): State<Shared>| async move { json(Ok(c.status())) }))
        .route("/v1/pool", get(|State(c): State<Shared>| async move { json(c.pool()) }))
        .route("/v1/volumes", get(|State(c): State<Shared>| async move { json(c.volumes()) }))
        .route("/v1/subsystems", get(|State(c): State<Shared>| async move { json(Ok(c.subsystems())) }))
        .route("/v1/listeners", get(|State(c): State<Shared>| async move { json(Ok(c.listeners())) }))
        .route("/v1/config", get(|State(c): State<Shared>| async move { json(Ok(c.config())) }))
        .route("/v1/metrics", get(|State(c): State<Shared>| async move { text(c.metrics()) }))
        .route("/v1/pool/replace", change(turns, |c, body| c.replace_member(body)))
        .route("/v1/pool/attach", change(turns, |c, body| c.attach_member(body)))
        .route("/v1/pool/scrub", change(turns, |c, body| c.scrub(body)))
        .route("/v1/volume/create", change(turns, |c, body| c.create_volume(body)))
        .route("/v1/volume/delete", change(turns, |c, body| c.delete_volume(body)))
        .route("/v1/volume/resize", change(turns, |c, body| c.resize_volume(body)))
        .route("/v1/volume/snapshot", change(turns, |c, body| c.snapshot_volume(body)))
        .route("/v1/volume/clone", change(turns, |c, body| c.clone_volume(body)))
        .route("/v1/keys", get(|State(c): State<Shared>| async move { json(c.keys()) }))
        .route("/v1/receipts", get(|State(c): State<Shared>| async move { json(c.receipts()) }))
        .route("/v1/key/member-destroyed", change(turns, |c, body| c.member_destroyed(body)))
        .route("/v1/key/rotate", change(turns, |c, body| c.rotate_key(body)))
        .route("/v1/subsystem/add", change(turns, |c, body| c.add_subsystem(body)))
        .route("/v1/subsystem/remove", change(turns, |c, body| c.remove_subsystem(body)))
        .route("/v1/namespace/add", change(turns, |c, body| c.add_namespace(body)))
        .route("/v1/namespace/remove", change(turns, |c, body| c.remove_namespace(body)))
        .route("/v1/host/allow", change(turns, |c, body| c.allow_host(body)))
        .route("/v1/host/deny", change(turns, |c, body| c.deny_host(body)))
        .route("/v1/listener/add", change(turns, |c, body| c.add_listener(body)))
        .route("/v1/listener/remove", change(turns, |c, body| c.remove_listener(body)))
        .fallback(|| async { refuse(Refusal::new(RefusalKind::NotFound, "no such path in the management API")) })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(control)
}

const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Reads a body, in its turn if it is large or of unknown length.
async fn read_body<B: DeserializeOwned>(request: Request, turns: &Semaphore) -> Result<axum::Json<B>, JsonRejection> {
    let length = request.headers().get(header::CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    let _turn = match length {
        Some(length) if length <= SMALL_BODY_BYTES => None,
        // Fails only once closed, which nobody does.
        _ => turns.acquire().await.ok(),
    };
    axum::Json::from_request(request, &()).await
}

/// A route that changes something: its body within [`BODY_LIMIT`], its answer within [`CALL_LIMIT`].
fn change<B, T>(
    turns: &Arc<Semaphore>,
    call: impl Fn(&dyn Control, B) -> BoxFuture<'static, Result<T, Refusal>> + Clone + Send + Sync + 'static,
) -> axum::routing::MethodRouter<Shared>
where
    B: DeserializeOwned + Send + 'static,
    T: Serialize + Send + 'static,
{
    let turns = Arc::clone(turns);
    post(move |State(control): State<Shared>, request: Request| async move {
        let body = tokio::time::timeout(BODY_LIMIT, read_body::<B>(request, &turns)).await;
        let body = match body {
            Ok(Ok(axum::Json(body))) => body,
            Ok(Err(rejection)) => return reject(&rejection),
            Err(_) => return refuse(Refusal::new(RefusalKind::Invalid, "the request's body did not come in time")),
        };
        // Spawned, so that a client that goes away does not leave a change half made.
        let task = tokio::spawn(call(control.as_ref(), body));
        match tokio::time::timeout(CALL_LIMIT, task).await {
            Ok(Ok(answer)) => json(answer),
            Ok(Err(_)) => refuse(Refusal::new(RefusalKind::Internal, "the call failed inside; see the log")),
            Err(_) => refuse(unfinished(&control.status())),
        }
    })
}

fn unfinished(status: &super::view::Status) -> Refusal {
    let waits_for = if status.waits_for.is_empty() { "requests under way" } else { status.waits_for.as_str() };
    let message = format!(
        "not finished after {} s, waiting for {waits_for}; it goes on and may still take effect",
        CALL_LIMIT.as_secs()
    );
    Refusal { kind: RefusalKind::Unfinished, message }
}

fn reject(rejection: &JsonRejection) -> Response {
    if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
        let message = format!("the request's body is over the limit of {MAX_BODY_BYTES} bytes");
        return (StatusCode::PAYLOAD_TOO_LARGE, axum::Json(Refusal { kind: RefusalKind::Invalid, message }))
            .into_response();
    }
    refuse(Refusal::new(RefusalKind::Invalid, rejection.body_text()))
}

fn json<T: Serialize>(answer: Result<T, Refusal>) -> Response {
    match answer {
        Ok(value) => axum::Json(value).into_response(),
        Err(refusal) => refuse(refusal),
    }
}

fn text(body: String) -> Response {
    ([(header::CONTENT_TYPE, METRICS_TYPE)], body).into_response()
}

fn refuse(refusal: Refusal) -> Response {
    let status = match refusal.kind {
        RefusalKind::Invalid => StatusCode::BAD_REQUEST,
        RefusalKind::NotFound => StatusCode::NOT_FOUND,
        RefusalKind::Conflict => StatusCode::CONFLICT,
        RefusalKind::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
        RefusalKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        RefusalKind::Unfinished => StatusCode::GATEWAY_TIMEOUT,
        RefusalKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    };
    (status, axum::Json(refusal)).into_response()
}
