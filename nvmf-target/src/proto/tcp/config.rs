//! Settings of a connection: what the listener fixes, and what Connect adds.

use std::time::Duration;

/// Settings of one side of an NVMe/TCP connection, fixed before ICReq.
#[derive(Debug, Clone)]
pub struct TcpConfig {
    /// Agree to header digests when the host asks.
    pub allow_header_digest: bool,
    /// Agree to data digests when the host asks.
    pub allow_data_digest: bool,
    /// CPDA: alignment asked of the host's data, in dwords minus one, 0 to 31. Linux accepts 0 only.
    pub cpda: u8,
    /// MAXH2CDATA: most data bytes in one H2CData; a multiple of 4, at least 4096.
    pub max_h2c_data_bytes: u32,
    /// Most bytes that one R2T asks for. Hosts before Linux 5.17 answer an R2T in one PDU, whatever MAXH2CDATA.
    pub max_r2t_bytes: u32,
    /// Most data bytes in one C2HData.
    pub max_c2h_data_bytes: u32,
    /// In-capsule data before Connect is answered, and on the admin queue; Connect itself needs 1024.
    pub admin_in_capsule_bytes: u32,
    /// The staging buffer for received bytes, before Connect is answered.
    pub staging_bytes: usize,
    /// How long a host may take over data that it was asked for.
    pub transfer_timeout: Duration,
    /// How long a host may leave bytes that are ready for it, taking less than 64 KiB of them.
    pub send_timeout: Duration,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            allow_header_digest: true,
            allow_data_digest: true,
            cpda: 0,
            max_h2c_data_bytes: 1 << 20,
            max_r2t_bytes: 1 << 20,
            max_c2h_data_bytes: 1 << 20,
            admin_in_capsule_bytes: 8192,
            staging_bytes: 16 << 10,
            transfer_timeout: Duration::from_secs(30),
            send_timeout: Duration::from_secs(30),
        }
    }
}

/// What an accepted Connect settles for a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueParams {
    /// SQSIZE + 1.
    pub entries: u16,
    /// CATTR bit 2 was 0: SQHD is meaningful and the SUCCESS flag is never used.
    pub sq_flow_control: bool,
    /// Most in-capsule data from now on: (IOCCSZ - 4) * 16 of an I/O queue.
    pub in_capsule_bytes: u32,
    /// Size of the staging buffer from now on.
    pub staging_bytes: usize,
}

/// What one command may add to the output besides pool buffers: data that is small enough to be copied, headers,
/// digests, padding, R2Ts.
const OUTPUT_BYTES_PER_COMMAND: usize = 4096 + 512;
/// One bit for each command id.
const COMMAND_ID_BYTES: usize = 65_536 / 8;

impl QueueParams {
    /// The most memory that a connection with these settings holds, besides buffers of the pool: staging, the reserve
    /// for in-capsule data (resident only once used), and the output. For memory plans.
    pub fn bound_bytes(&self) -> usize {
        let entries = usize::from(self.entries);
        let reserve = entries * self.in_capsule_bytes as usize;
        self.staging_bytes + reserve + entries * OUTPUT_BYTES_PER_COMMAND + COMMAND_ID_BYTES
    }
}
