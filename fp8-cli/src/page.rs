//! Pages of HTML that need no other file: the reports of `fp8 inspect` and `fp8 train`.

use std::fmt::Write as _;

/// Returns a whole page: `body` below `title`, with the styles of all reports, light or dark as the reader's system is.
pub(crate) fn document(title: &str, body: &str) -> String {
    let mut page = String::from("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    page += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
    page += "<meta name=\"color-scheme\" content=\"light dark\">\n";
    let _ =
        write!(page, "<title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n", escape(title));
    page + body + "</main>\n</body>\n</html>\n"
}

const STYLE: &str = include_str!("page.css");

/// Returns a card with a title, a note and a body, all of HTML. An empty note is left out.
pub(crate) fn section(title: &str, note: &str, body: &str) -> String {
    let mut html = format!("<section>\n<h2>{title}</h2>\n");
    if !note.is_empty() {
        let _ = writeln!(html, "<p class=\"note\">{note}</p>");
    }
    html + body + "</section>\n"
}

/// Escapes text for HTML.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Writes 1234567 as 1,234,567.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Writes a share of 0 to 1 as a percentage, without the sign.
pub(crate) fn percent(share: f64) -> String {
    match share * 100.0 {
        0.0 => "0".to_owned(),
        percent if percent < 1e-4 => "<0.0001".to_owned(),
        percent if percent < 0.1 => format!("{percent:.4}"),
        percent => format!("{percent:.2}"),
    }
}

/// Writes a difference in percent with its sign, as `+0.12` or `−0.12`.
pub(crate) fn signed(percent: f64) -> String {
    // Zero gets no minus sign, even if it was rounded to zero.
    let text = format!("{percent:+.2}");
    match text.as_str() {
        "-0.00" => "+0.00".to_owned(),
        _ => text.replace('-', "−"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_made_of_sections() {
        let table = format!("<p>{} of {} values: {} %</p>\n", grouped(1234), grouped(123_400), percent(0.01));
        let page = document("A < B", &section(&escape("A < B"), "", &table));
        assert!(page.contains("<title>A &lt; B</title>") && page.contains("1,234 of 123,400 values: 1.00 %"));
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }

    #[test]
    fn percentages_are_short() {
        assert_eq!([0.0, 1e-7, 1e-5, 0.25].map(percent), ["0", "<0.0001", "0.0010", "25.00"]);
        assert_eq!([0.123, -0.123, -0.001, 0.0].map(signed), ["+0.12", "−0.12", "+0.00", "+0.00"]);
    }
}
