//! `offload-svc explain`: which engine runs each primitive, and why.
//!
//! Owns the table. Must not know how engines are chosen. Invariant: every figure in it was measured by this process.

use comfy_table::{CellAlignment, Table, presets};

use crate::stages::engines::{self, Explanation};

/// As a table, or as JSON.
///
/// # Errors
/// If the JSON can't be made, which no explanation leads to.
pub fn explain(json: bool) -> serde_json::Result<String> {
    let explanation = engines::explain();
    if json { serde_json::to_string_pretty(explanation) } else { Ok(table(explanation)) }
}

fn table(explanation: &Explanation) -> String {
    let mut rows = Table::new();
    rows.load_style(presets::UTF8_FULL_CONDENSED).set_header(["primitive", "engine", "GB/s", "runs", "why"]);
    for primitive in &explanation.primitives {
        let chosen = |gigabytes: String| {
            [
                primitive.name.to_owned(),
                primitive.chosen.to_owned(),
                gigabytes,
                "yes".to_owned(),
                primitive.why.to_string(),
            ]
        };
        // A format's own library has no rival to be measured against.
        if primitive.engines.is_empty() {
            rows.add_row(chosen(String::new()));
        }
        for engine in &primitive.engines {
            let gigabytes = format!("{:.2}", engine.gigabytes_per_second);
            if engine.name == primitive.chosen {
                rows.add_row(chosen(gigabytes));
            } else {
                let others = [primitive.name.to_owned(), engine.name.to_owned(), gigabytes];
                rows.add_row(others.into_iter().chain([String::new(), String::new()]));
            }
        }
    }
    if let Some(column) = rows.column_mut(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("{rows}\nmeasured on {} bytes, one core, cache-warm", explanation.calibration_bytes)
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_primitive_is_explained_once() {
        let explanation = crate::stages::engines::explain();
        let table = super::explain(false).unwrap();
        let json = super::explain(true).unwrap();
        for primitive in &explanation.primitives {
            assert!(table.contains(&primitive.why.to_string()), "{}", primitive.name);
            assert!(json.contains(primitive.chosen), "{}", primitive.name);
            let rows =
                table.lines().filter(|line| line.contains(&format!(" {} ", primitive.name)) && line.contains(" yes "));
            assert!(rows.clone().count() == 1 && rows.clone().all(|row| row.contains(primitive.chosen)), "{table}");
        }
        assert_eq!(table.matches(" yes ").count(), explanation.primitives.len());
    }
}
