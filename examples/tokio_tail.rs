//! A producer and a consumer at the end of the log, as two tasks on one thread of tokio.
//!
//! cargo run --example tokio_tail --features async
//!
//! Nothing in it is tokio's but the runtime: any other does as well.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use sapwood::{Batch, Broker, Partition, TailStream};

const RECORDS: u64 = 5;

async fn produce(partition: Partition) -> sapwood::Result<()> {
    for number in 0..RECORDS {
        // A task must not wait for room in the queue: `try_append` gives the batch back instead. Here there is room.
        let batch = Batch::of(None, format!("number {number}").as_bytes())?;
        let offsets = partition.append(batch)?.await?;
        println!("appended {}, on the device", offsets.start);
    }
    Ok(())
}

async fn consume(mut records: TailStream) -> sapwood::Result<()> {
    while let Some(record) = records.next_record().await {
        let record = record?;
        println!("           {} {}", record.offset, record.value.escape_ascii());
        if record.offset + 1 == RECORDS {
            break;
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let dir = std::env::temp_dir().join(format!("sapwood-tokio-tail-{}", std::process::id()));
    let broker = Broker::open(&dir, Default::default())?;
    let partition = broker.create_topic("greetings", Default::default())?.partition(0)?;
    let records = partition.tail(partition.durable_end())?.into_stream();

    tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
        let consumer = tokio::spawn(consume(records));
        produce(partition).await?;
        consumer.await??;
        Ok::<_, Box<dyn Error>>(())
    })?;

    broker.close()?;
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}
