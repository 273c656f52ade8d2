//! The record decoder: any bytes, any offset expected.

use super::format::{Fault, HEADER, Stored, u64_at};
use crate::record::{Batch, Header, Record};

/// Decodes the bytes as the record that they say they are, and as others.
pub fn record(data: &[u8]) {
    let stored = if data.len() < 8 { 0 } else { u64_at(data, 0) };
    for expected in [stored, stored.wrapping_add(1), 0] {
        let wanted = Stored::decode(data, expected);
        match (Record::decode(data, expected), wanted) {
            (Ok((record, len)), Ok(wanted)) => {
                assert_eq!((record.offset, record.timestamp, len), (wanted.offset, wanted.timestamp, wanted.bytes()));
                assert_eq!((record.key, record.value), wanted.body.split_at(wanted.keylen as usize));
                survives_no_cut(&data[..len], expected);
            }
            (Err(flaw), Err(fault)) => assert_eq!(Fault::from(flaw), fault),
            (engine, wanted) => panic!("expected as {expected}: {engine:?}, but the format says {wanted:?}"),
        }
    }
    if let Some(header) = data.first_chunk::<HEADER>() {
        assert_eq!(&Header::parse(header).encode(), header);
    }
    written_and_read(data);
}

/// A whole record is none any more without its end, whatever follows.
fn survives_no_cut(record: &[u8], expected: u64) {
    for len in [0, HEADER - 1, HEADER, record.len() - 1].into_iter().filter(|&len| len < record.len()) {
        assert!(Record::decode(&record[..len], expected).is_err(), "cut to {len} bytes");
    }
    assert!(Record::decode(&[record, b"more"].concat(), expected).is_ok());
}

/// The bytes as a record's key and value come back as they were.
fn written_and_read(data: &[u8]) {
    let (key, value) = data.split_at(data.first().map_or(0, |&byte| usize::from(byte).min(data.len())));
    let batch = Batch::of(Some(key), value).unwrap();
    let mut bytes = vec![0; batch.bytes() as usize];
    batch.encode_record(0, 7, u64::MAX, &mut bytes);
    let wanted = Stored { offset: 7, timestamp: u64::MAX, keylen: key.len() as u32, body: data.to_vec() };
    assert_eq!(bytes, wanted.encode());
    assert_eq!(Record::decode(&bytes, 7).map(|(record, len)| (record.key, record.value, len)), Ok((key, value, bytes.len())));
}
