import java.util.Map;
import org.apache.kafka.clients.producer.KafkaProducer;

/** java Enqueue TOPIC_OF_JOBS TOPIC_OF_EVENTS ORDER */
public final class Enqueue {
    public static void main(String[] arguments) throws Exception {
        String jobs = arguments[0], events = arguments[1], order = arguments[2];
        try (var producer = new KafkaProducer<byte[], byte[]>(Kjo.settings("shop"))) {
            Map<String, ?> mail = Map.of("order", order);
            producer.send(Kjo.job(jobs, order, "mail-" + order, "shop.mail", mail)).get();
            Map<String, ?> data = Map.of("userId", "u7", "order", order);
            Map<String, ?> paid =
                    Map.of("id", "paid-" + order, "type", "ORDER_PAID", "source", "checkout", "data", data);
            producer.send(Kjo.event(events, paid)).get();
        }
    }
}
