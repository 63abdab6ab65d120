import java.time.Duration;
import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.consumer.KafkaConsumer;

/** java Follow TOPIC_OF_EVENTS CONSUMER_GROUP */
public final class Follow {
    public static void main(String[] arguments) {
        try (var consumer = new KafkaConsumer<byte[], byte[]>(Kjo.settings(arguments[1]))) {
            consumer.subscribe(List.of(arguments[0]));
            var handled = Map.of("ORDER_PAID", List.of("1"));
            while (true) {
                for (var record : consumer.poll(Duration.ofSeconds(1))) {
                    try {
                        Kjo.readEvent(record, handled).ifPresent(Follow::tell);
                    } catch (Kjo.Refused refused) {
                        System.out.println("refused: " + refused.reason);
                    }
                }
                consumer.commitSync();
            }
        }
    }

    private static void tell(com.fasterxml.jackson.databind.node.ObjectNode event) {
        String order = event.get("data").get("order").asText();
        System.out.println(order + " is paid by " + Kjo.key(event));
    }
}
