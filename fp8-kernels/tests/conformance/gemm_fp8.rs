use super::case::cases;

cases![];
