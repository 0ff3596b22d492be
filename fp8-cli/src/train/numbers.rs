//! Whole numbers as values of options.

/// Parses a whole number from MIN to MAX.
pub(crate) fn number<const MIN: usize, const MAX: usize>(text: &str) -> Result<usize, String> {
    match text.parse::<u128>() {
        Ok(number) if number < MIN as u128 => Err(format!("must be at least {MIN}")),
        Ok(number) if number > MAX as u128 => Err(format!("must be at most {MAX}")),
        Ok(number) => usize::try_from(number).map_err(|_| format!("must be at most {MAX}")),
        Err(_) => Err(format!("must be a whole number from {MIN} to {MAX}")),
    }
}

/// Parses a whole number from 1 to MAX.
pub(crate) fn count<const MAX: usize>(text: &str) -> Result<usize, String> {
    number::<1, MAX>(text)
}
