//! The management API's client side: what `offloadctl` is built on.
//!
//! Owns one request over the Unix socket. Must not know what is asked. Invariant: it ends within [`CLIENT_LIMIT`].

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::body::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::net::UnixStream;

use super::{CALL_LIMIT, Refusal};

/// A call that isn't answered by then has failed.
pub const CLIENT_LIMIT: Duration = Duration::from_secs(CALL_LIMIT.as_secs() + 5);
/// No answer is longer.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody there.
    #[error("{}: {source}: {}", path.display(), remedy(source))]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The service said no.
    #[error("{0}")]
    Refused(#[source] Refusal),
    /// The connection broke.
    #[error("the service closed the connection: {0}")]
    Http(#[from] hyper::Error),
    /// The answer was cut off or too long.
    #[error("the service's answer was cut off or too long")]
    Answer,
    /// The answer isn't what this version expects.
    #[error("the service's answer is not understood: {0}: are offloadctl and offload-svc of the same version?")]
    Json(#[from] serde_json::Error),
    /// Something else than a refusal.
    #[error("the service answered with HTTP status {0}")]
    Status(StatusCode),
    /// No answer.
    #[error("no answer within {} s", CLIENT_LIMIT.as_secs())]
    Timeout,
}

/// What to do about a socket that can't be used.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "only root and the user that offload-svc runs as may use it",
        io::ErrorKind::InvalidInput => "a socket's path has at most 107 bytes: give service.socket with --socket",
        _ => "is offload-svc running? Give its service.socket with --socket",
    }
}

/// Talks to one service.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// A client of the service that listens on `socket`.
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned() }
    }

    /// `GET path`: the answer's body.
    ///
    /// # Errors
    /// If there is no answer or it is a refusal.
    pub async fn get(&self, path: &str) -> Result<Bytes, ClientError> {
        self.send(Method::GET, path, Bytes::new()).await
    }

    /// `POST path` with `body` as JSON: the answer's body.
    ///
    /// # Errors
    /// If there is no answer or it is a refusal.
    pub async fn post(&self, path: &str, body: &impl Serialize) -> Result<Bytes, ClientError> {
        let body = serde_json::to_vec(body)?;
        self.send(Method::POST, path, body.into()).await
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, ClientError> {
        let exchange = self.exchange(method, path, body);
        tokio::time::timeout(CLIENT_LIMIT, exchange).await.map_err(|_| ClientError::Timeout)?
    }

    async fn exchange(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, ClientError> {
        let connect = |source| ClientError::Connect { path: self.socket.clone(), source };
        let stream = UnixStream::connect(&self.socket).await.map_err(connect)?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let connection = tokio::spawn(connection);
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().map_err(|_| ClientError::Answer)?;
        let headers = request.headers_mut();
        headers.insert(header::HOST, header::HeaderValue::from_static("sluice"));
        headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await;
        let body = body.map_err(|_| ClientError::Answer)?.to_bytes();
        drop(sender);
        let _ = connection.await;
        if status.is_success() {
            return Ok(body);
        }
        Err(serde_json::from_slice(&body).map_or(ClientError::Status(status), ClientError::Refused))
    }
}
