import com.fasterxml.jackson.databind.ObjectMapper;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;

/** java Payments TOPIC REDELIVERY_TOPIC DEAD_LETTER_TOPIC CONSUMER_GROUP */
public final class Payments {
    public static void main(String[] arguments) throws Exception {
        String from = arguments[0], again = arguments[1], dlq = arguments[2], group = arguments[3];
        var config = new Kjo.Config(group, again, dlq, 4, 3, false);
        try (var producer = new KafkaProducer<byte[], byte[]>(Kjo.settings(group));
                var consumer = new KafkaConsumer<byte[], byte[]>(Kjo.settings(group))) {
            consumer.subscribe(List.of(from, dlq));
            while (true) {
                for (var record : consumer.poll(Duration.ofSeconds(1))) {
                    var decision = Kjo.accept(record, Payments::book, config);
                    if (decision.record() != null) {
                        producer.send(decision.record()).get();
                    }
                    System.out.println(decision.status() + " " + text(record.key()));
                }
                consumer.commitSync(); // After what was sent, so that a crash loses nothing.
            }
        }
    }

    private static String text(byte[] key) {
        return key == null ? "null" : new String(key, StandardCharsets.UTF_8);
    }

    private static Kjo.Answer book(ConsumerRecord<byte[], byte[]> record) throws Exception {
        var state = new ObjectMapper().readTree(record.value()).get("state").asText();
        if (state.equals("unknown")) {
            throw new IllegalStateException("no such account"); // kills it
        }
        return state.equals("pending") ? Kjo.Answer.MUST_BE_REDELIVERED : Kjo.Answer.OK;
    }
}
